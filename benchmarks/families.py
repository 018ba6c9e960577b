"""What each family of backbones can do: docs/reference/backbones.md is made from benchmarks/families.json.

    python -m benchmarks.families --json benchmarks/families.json
    python docs/generate.py

One model stands for each family, with random weights and one torch thread. The text tower of BiomedCLIP is one of
transformers, of which this writes the published configuration (``config.json`` of BiomedNLP-BiomedBERT) into a folder,
with a small vocabulary: nothing is downloaded. Where a tokenizer is not on the machine, no text step is timed.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, parser, write
from promptfed.runtime.backbones import examine
from promptfed.shared.clip import BackboneError

SECONDS = 400.0


@dataclass(frozen=True)
class Family:
    """``model`` stands for the family; ``template``: the sentence that its authors test with."""

    name: str
    model: str
    template: str


BIOMEDCLIP = "BiomedCLIP"
FAMILIES = (
    Family("CLIP, OpenCLIP, MetaCLIP, DFN; PLIP", "ViT-B-16", "a photo of a {}. (PLIP: An H&E image of {}.)"),
    Family("CLIP with a ResNet", "RN50", "a photo of a {}."),
    Family("SigLIP, MedSigLIP", "ViT-B-16-SigLIP", "a photo of a {}. (MedSigLIP: a finding in words)"),
    Family("SigLIP 2", "ViT-B-16-SigLIP2", "This is a photo of {}."),
    Family("EVA-02", "EVA02-B-16", "a photo of a {}."),
    Family("CoCa", "coca_ViT-B-32", "a photo of a {}."),
    Family("MobileCLIP-B", "MobileCLIP-B", "a photo of a {}."),
    Family("MobileCLIP-S", "MobileCLIP-S1", "a photo of a {}."),
    Family("Perception Encoder", "PE-Core-B-16", "a photo of a {}."),
    Family("ConvNeXt", "convnext_base", "a photo of a {}."),
    Family("ViTamin", "ViTamin-B", "a photo of a {}."),
    Family("BiomedCLIP", BIOMEDCLIP, "this is a photo of {}."),
)
BERT = {
    "model_type": "bert",
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
PREPARATION = {"mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]}


def biomedclip(folder: Path) -> str:
    """A folder with BiomedCLIP's configuration and random weights; open_clip's name for it."""
    import open_clip
    import torch
    import transformers

    (folder / "config.json").write_text(json.dumps(BERT))
    vision = {"timm_model_name": "vit_base_patch16_224", "timm_model_pretrained": False, "timm_pool": ""}
    text = {"hf_model_name": str(folder), "hf_tokenizer_name": str(folder), "hf_proj_type": "mlp"}
    text |= {"hf_pooler_type": "cls_last_hidden_state_pooler"}
    model = {
        "embed_dim": 512,
        "vision_cfg": vision | {"timm_proj": "linear", "image_size": 224},
        "text_cfg": text | {"context_length": 256},
    }
    about = {"model_cfg": model, "preprocess_cfg": PREPARATION}
    (folder / "open_clip_config.json").write_text(json.dumps(about))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "x", "thing", *map(str, range(10))]
    vocabulary = {word: number for number, word in enumerate(words)}
    transformers.BertTokenizerFast(vocab=vocabulary).save_pretrained(folder)
    made = open_clip.create_model(f"local-dir:{folder}", pretrained_text=False)
    torch.save(made.state_dict(), folder / "open_clip_pytorch_model.bin")
    return f"local-dir:{folder}"


def main() -> None:
    """Measure all families, and write the file after each."""
    command = parser(__doc__)
    command.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = command.parse_args()
    numbers: dict[str, Any] = {"about": machine(), "device": options.device, "families": []}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as place:
            model = biomedclip(Path(place)) if family.model == BIOMEDCLIP else family.model
            try:
                facts = asdict(examine(model, device=options.device, seconds=SECONDS))
            except BackboneError as error:
                facts = {"failed": str(error)}
        numbers["families"].append(asdict(family) | {"facts": facts | {"model": family.model}})
        print(family.name, facts.get("failed", "measured"), flush=True)
        write(options.json, numbers)


if __name__ == "__main__":
    main()
