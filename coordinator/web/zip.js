// Files in one ZIP archive, stored as they are: tensors do not become smaller by packing.

const TABLE = Uint32Array.from({ length: 256 }, (_, at) => {
  let rest = at;
  for (let bit = 0; bit < 8; bit += 1) rest = rest & 1 ? 0xedb88320 ^ (rest >>> 1) : rest >>> 1;
  return rest;
});

function crc32(bytes) {
  let sum = 0xffffffff;
  for (const byte of bytes) sum = TABLE[(sum ^ byte) & 0xff] ^ (sum >>> 8);
  return (sum ^ 0xffffffff) >>> 0;
}

/** Little-endian numbers of the widths given: `[[2, 20], [4, crc]]`. */
function packed(fields) {
  const view = new DataView(new ArrayBuffer(fields.reduce((sum, [width]) => sum + width, 0)));
  let at = 0;
  for (const [width, value] of fields) {
    if (width === 2) view.setUint16(at, value, true);
    else view.setUint32(at, value, true);
    at += width;
  }
  return new Uint8Array(view.buffer);
}

/** `files` are `[name, Uint8Array]`; the archive as a Blob. */
export function zip(files) {
  const now = new Date();
  const time = (now.getHours() << 11) | (now.getMinutes() << 5) | (now.getSeconds() >> 1);
  const date = ((now.getFullYear() - 1980) << 9) | ((now.getMonth() + 1) << 5) | now.getDate();
  const parts = [];
  const directory = [];
  let offset = 0;
  for (const [name, bytes] of files) {
    const label = new TextEncoder().encode(name);
    const common = [[2, 20], [2, 0x0800], [2, 0], [2, time], [2, date], [4, crc32(bytes)], [4, bytes.length], [4, bytes.length], [2, label.length], [2, 0]];
    const head = packed([[4, 0x04034b50], ...common]);
    directory.push(packed([[4, 0x02014b50], [2, 20], ...common, [2, 0], [2, 0], [2, 0], [4, 0], [4, offset]]), label);
    parts.push(head, label, bytes);
    offset += head.length + label.length + bytes.length;
  }
  const size = directory.reduce((sum, one) => sum + one.length, 0);
  const end = packed([[4, 0x06054b50], [2, 0], [2, 0], [2, files.length], [2, files.length], [4, size], [4, offset], [2, 0]]);
  return new Blob([...parts, ...directory, end], { type: "application/zip" });
}
