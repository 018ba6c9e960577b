"""What secure sums cost: seconds and bytes of a client, and the seconds that the five steps add to a round.

First the protocol alone, without training and HTTP: all steps of 10, 100 and 1,000 clients, three in ten of whom are
lost before they mask, with a vector of 8,192 numbers. Client seconds are CPU seconds and bytes are those on the
wire, both as medians over the clients; the coordinator's seconds are those in which it opens the sum. The bytes are
compared with a plain update of as many numbers.

Then processes on loopback: five clients and a coordinator, ``--repeats`` times a plain and a summed federation. The
steps add the difference of the median seconds of a phase, from its opening to the next state.

    python -m benchmarks.secure_sums --json benchmarks/secure_sums.json --docs docs/guides/secure-aggregation.md
    python -m benchmarks.secure_sums --clients 10,100 --repeats 1 --rounds 4
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import BaseModel

from benchmarks.harness import fill_tables, in_words, integers, machine, medians, parser, table, write
from benchmarks.round_overhead import run_processes
from promptfed.runtime.services import Site
from promptfed.shared.messages import UpdateMetadata
from promptfed.shared.secagg import keys, member, opening
from promptfed.shared.secagg.encoding import SCALE, encoded
from promptfed.shared.secagg.messages import (
    ConfirmAnswer,
    ConfirmJob,
    KeysAnswer,
    MaskJob,
    RosterMessage,
    SharesAnswer,
    UnmaskAnswer,
    UnmaskJob,
)
from promptfed.shared.secagg.roster import make_roster, read_roster
from promptfed.shared.spec.spec_aggregation import SecureAggregationSpec
from promptfed.shared.spec.weighting import Weighting
from promptfed.shared.tensors.torch_tensors import encode

SPEC, UNIFORM = SecureAggregationSpec(), Weighting(weighting="uniform")
NUMBERS = 8192  # in the vector
LOST = 0.3  # share of the clients that is lost between the steps share and mask
BAR_SECONDS, BAR_BYTES, BAR_CLIENTS = 0.5, 3.0, 100
DIGEST = "sha256:" + "1" * 64
ABOUT = {
    "federation_id": "fed-1",
    "round": 1,
    "phase": "train",
    "attempt": 1,
    "payload_sha256": DIGEST,
    "terms": "2" * 64,
    "samples": 1,
}

T = TypeVar("T")


@dataclass
class Client:
    """A simulated client: its state between the steps, its CPU seconds, and its bytes on the wire."""

    vector: Any  # (d,) float64
    seconds: float = 0.0
    up: int = 0
    down: int = 0

    def step(self, work: Callable[[bytes], tuple[BaseModel | bytes, T]], message: BaseModel | None = None) -> T:
        """Call ``work`` with the coordinator's message and measure it.

        ``work`` returns what goes to the coordinator, whose bytes are counted, and the value that is returned here.
        """
        body = b"" if message is None else message.model_dump_json().encode()
        began = time.process_time()
        answer, value = work(body)
        self.seconds += time.process_time() - began
        self.down += len(body)
        self.up += len(answer if isinstance(answer, bytes) else answer.model_dump_json().encode())
        return value

    def keys(self, _: bytes) -> tuple[KeysAnswer, KeysAnswer]:
        """Step train."""
        self.secrets = member.Secrets.fresh(keys.new_identity())
        self.entry = member.signed_entry(self.secrets, ABOUT)
        return self.entry, self.entry

    def share(self, body: bytes) -> tuple[SharesAnswer, SharesAnswer]:
        """Step share."""
        self.roster = read_roster(RosterMessage.model_validate_json(body), self.entry, SPEC, SPEC.minimum, UNIFORM)
        self.place = self.roster.place_of(self.entry.entry)
        answer, self.shared = member.share_secrets(self.secrets, self.roster, self.place)
        return answer, answer

    def mask(self, body: bytes) -> tuple[bytes, Any]:
        """Step mask."""
        job = MaskJob.model_validate_json(body)
        pairs = member.open_boxes(self.secrets, self.roster, self.place, job, member.Limits())
        self.held, self.sharing = {self.place: self.shared, **pairs}, job.sharing
        vector = encoded(self.vector).view(np.uint64)
        masked = member.mask_vector(self.secrets, self.roster, self.place, job.sharing, vector)
        tensor = torch.from_numpy(masked.view(np.int64))
        return encode({"masked": tensor}, {"roster_sha256": self.roster.sha256.hex()}), masked

    def confirm(self, body: bytes) -> tuple[ConfirmAnswer, ConfirmAnswer]:
        """Step confirm."""
        self.list = ConfirmJob.model_validate_json(body)
        limits = member.Limits()
        answer = member.confirm_list(self.secrets, self.roster, self.place, self.sharing, self.list, limits)
        return answer, answer

    def unmask(self, body: bytes) -> tuple[UnmaskAnswer, UnmaskAnswer]:
        """Step unmask."""
        job = UnmaskJob.model_validate_json(body)
        answer = member.reveal_shares(self.roster, self.place, self.list, self.held, job)
        return answer, answer


def protocol(count: int, numbers: int) -> dict[str, Any]:
    """Run all steps of ``count`` clients once; their costs. SystemExit if the sum is wrong."""
    source = np.random.default_rng(7)
    clients = [Client(source.integers(-(1 << 30), 1 << 30, numbers) / SCALE) for _ in range(count)]
    made, signed = make_roster([client.step(client.keys) for client in clients], SPEC, UNIFORM)
    shares: dict[int, SharesAnswer] = {}
    for client in clients:
        place = made.place_of(client.entry.entry)
        shares[place] = client.step(client.share, made.message(signed, place))
    there = clients[: count - int(LOST * count)]
    vectors = {client.place: client.step(client.mask, opening.mask_job(made, client.place, shares)) for client in there}
    confirm = opening.confirm_job(shares, vectors)
    answers = {client.place: client.step(client.confirm, confirm) for client in there}
    reveals = {
        client.place: client.step(client.unmask, opening.unmask_job(made, client.place, answers)) for client in there
    }
    began = time.process_time()
    total = opening.open_sum(made, confirm, (vectors[place] for place in confirm.alive), reveals, shares)
    opened = time.process_time() - began
    if not np.array_equal(total.view(np.int64) / SCALE, sum(client.vector for client in there)):
        raise SystemExit("the sum is not that of the clients")
    return {
        "clients": count,
        "neighbours": made.graph.neighbours or count - 1,
        "client_seconds": statistics.median(client.seconds for client in there),
        "client_bytes_up": statistics.median(client.up for client in there),
        "client_bytes_down": statistics.median(client.down for client in there),
        "plain_bytes_up": plain_bytes(numbers),
        "opening_seconds": opened,
    }


def plain_bytes(numbers: int) -> int:
    """Bytes of a plain update with so many numbers."""
    about = UpdateMetadata(
        task_id="tsk-" + "0" * 16, payload_sha256=DIGEST, metrics={"loss": 0.5, "train_seconds": 0.5}
    )
    return len(encode({"context": torch.zeros(numbers)}, about.model_dump()))


def rounds(repeats: int, count: int, clients: int = 5) -> dict[str, Any]:
    """Run plain and summed federations in processes, in turns; medians over all rounds but the first of each run."""
    seconds: dict[str, list[float]] = defaultdict(list)
    steps: dict[str, list[float]] = defaultdict(list)
    sent: dict[str, list[int]] = defaultdict(list)
    for repeat in range(repeats):
        ways = ["plain", "summed"] if repeat % 2 == 0 else ["summed", "plain"]
        for way in ways:
            for report in run_processes(*plan(way, count, clients))[2:]:
                (phase,) = report["phases"]
                seconds[way].append(phase["seconds"])
                sent[way].append(phase["bytes_up"] // clients)
                for step in phase["secure"]["steps"] if way == "summed" else ():
                    steps[step["kind"]].append(step["seconds"])
    typical = medians(seconds)
    return {
        "clients": clients,
        "rounds": len(seconds["plain"]),
        "plain_seconds": typical["plain"],
        "summed_seconds": typical["summed"],
        "added_seconds": typical["summed"] - typical["plain"],
        "step_seconds": medians(steps),
        "bytes_up": medians(sent),
    }


def plan(way: str, count: int, clients: int) -> tuple[dict[str, Any], list[Site]]:
    """The spec and the clients of a run. ``way``: plain or summed."""
    spec: dict[str, Any] = {
        "name": way,
        "method": {"name": "promptfl"},
        "rounds": count,
        "participation": {"min_clients": clients},
        "aggregation": {"weighting": "uniform"},
        "evaluation": {"every": count},
    }
    if way == "summed":
        spec["secure_aggregation"] = {}
    styles = ("painting", "sketch", "quickdraw", "neon", "chalk")
    return spec, [Site(f"site-{k}", f"symbols:{styles[k % 5]}?topic=weather&per_class=4") for k in range(clients)]


def as_table(measured: dict[str, Any]) -> str:
    """The table and the sentence of the documentation, in Markdown."""
    rows = []
    for case in measured["protocol"]:
        ratio = case["client_bytes_up"] / case["plain_bytes_up"]
        up = f"{case['client_bytes_up'] / 1000:,.0f} KB ({ratio:.2f} × plain)"
        row = [f"{case['clients']:,}", str(case["neighbours"]), in_words(case["client_seconds"]), up]
        rows.append([*row, f"{case['client_bytes_down'] / 1000:,.0f} KB", in_words(case["opening_seconds"])])
    columns = ["clients", "share with", "CPU of a client", "up", "down", "coordinator opens in"]
    text, played = table(columns, rows, texts=0), measured["rounds"]
    if played is None:
        return text
    steps = ", ".join(f"{kind} {in_words(value)}" for kind, value in played["step_seconds"].items())
    return (
        f"{text}\n\nA round of {played['clients']} processes on loopback ({played['rounds']} rounds each, medians): "
        f"{in_words(played['plain_seconds'])} plain, {in_words(played['summed_seconds'])} summed: the steps add "
        f"**{in_words(played['added_seconds'])}** (bar: {in_words(BAR_SECONDS)}). By step: {steps}."
    )


def missed(measured: dict[str, Any]) -> list[str]:
    """A sentence for each bar that was missed."""
    problems = []
    for case in measured["protocol"]:
        ratio = case["client_bytes_up"] / case["plain_bytes_up"]
        if case["clients"] == BAR_CLIENTS and ratio > BAR_BYTES:
            problems.append(f"{ratio:.2f} times the plain bytes up at {BAR_CLIENTS} clients; {BAR_BYTES:g} is the bar")
    added = measured["rounds"]["added_seconds"] if measured["rounds"] is not None else 0.0
    if added > BAR_SECONDS:
        problems.append(f"the steps add {added:.2f} s to a round; {BAR_SECONDS:g} s is the bar")
    return problems


def main() -> None:
    """Run, print and write; SystemExit if a bar is missed."""
    command = parser(__doc__)
    command.add_argument("--clients", type=integers, default=[10, 100, 1000], help="numbers of clients")
    command.add_argument("--repeats", type=int, default=2, help="pairs of a plain and a summed federation; 0: none")
    command.add_argument("--rounds", type=int, default=8, help="rounds of each federation; the first is not measured")
    command.add_argument("--docs", type=Path, help="page in which the table is replaced")
    options = command.parse_args()
    if options.rounds < 2:
        command.error("--rounds: at least 2, since the first round is not measured")
    torch.set_num_threads(1)
    measured = {
        "machine": machine(),
        "numbers": NUMBERS,
        "lost": LOST,
        "protocol": [protocol(count, NUMBERS) for count in options.clients],
        "rounds": rounds(options.repeats, options.rounds) if options.repeats else None,
    }
    text = as_table(measured)
    print(text)
    write(options.json, measured)
    if options.docs is not None:
        options.docs.write_text(fill_tables(options.docs.read_text(), "secure sums", {"": text}))
    if problems := missed(measured):
        raise SystemExit("; ".join(problems))


if __name__ == "__main__":
    main()
