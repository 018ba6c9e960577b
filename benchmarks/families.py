"""What each family of backbones can do: docs/reference/backbones.md is made from benchmarks/families.json.

    python -m benchmarks.families --json benchmarks/families.json
    python docs/generate.py

One model stands for each family, with random weights and one torch thread. Nothing is downloaded: BiomedCLIP is built
from the configuration of its repository, and invented tokens stand in for tokenizers that are not on the machine.
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

SECONDS = 1800.0


@dataclass(frozen=True)
class Family:
    """``model`` stands for the family; ``template``: the sentence that its authors test with."""

    name: str
    model: str
    template: str


BIOMEDCLIP = "BiomedCLIP"
FAMILIES = (
    Family("CLIP, OpenCLIP, MetaCLIP, DFN", "ViT-B-16", "a photo of a {}."),
    Family("PLIP", "ViT-B-32-quickgelu", "An H&E image of {}."),
    Family("CLIP with a ResNet", "RN50", "a photo of a {}."),
    Family("SigLIP", "ViT-B-16-SigLIP", "a photo of a {}."),
    Family("MedSigLIP", "ViT-SO400M-14-SigLIP-448", "a finding in words, such as: a photo of an arm with no rash"),
    Family("SigLIP 2", "ViT-B-16-SigLIP2", "This is a photo of {}."),
    Family("EVA-02", "EVA02-B-16", "a photo of a {}."),
    Family("CoCa", "coca_ViT-B-32", "a photo of a {}."),
    Family("MobileCLIP-B", "MobileCLIP-B", "a photo of a {}."),
    Family("MobileCLIP-S", "MobileCLIP-S1", "a photo of a {}."),
    Family("Perception Encoder", "PE-Core-B-16", "a photo of a {}."),
    Family("ConvNeXt", "convnext_base", "a photo of a {}."),
    Family("ViTamin", "ViTamin-B", "a photo of a {}."),
    Family("BiomedCLIP", BIOMEDCLIP, "this is a photo of {}."),
    Family("CONCH", "conch_ViT-B-16", "an H&E image of {}."),
)
PREPARATION = {"mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]}


def biomedclip(folder: Path, pixels: int = 224) -> str:
    """A folder with BiomedCLIP's configuration and random weights, for ``pixels``; open_clip's name for it."""
    import open_clip
    import torch

    from promptfed.shared.clip.building import seeded
    from promptfed.shared.clip.published import known_text_models

    bert = "microsoft/BiomedNLP-BiomedBERT-base-uncased-abstract"
    vision = {"timm_model_name": "vit_base_patch16_224", "timm_model_pretrained": False, "timm_pool": ""}
    text = {"hf_model_name": bert, "hf_tokenizer_name": bert, "hf_proj_type": "mlp"}
    text |= {"hf_pooler_type": "cls_last_hidden_state_pooler"}
    model = {
        "embed_dim": 512,
        "vision_cfg": vision | {"timm_proj": "linear", "image_size": pixels},
        "text_cfg": text | {"context_length": 256},
    }
    about = {"model_cfg": model, "preprocess_cfg": PREPARATION}
    (folder / "open_clip_config.json").write_text(json.dumps(about))
    with seeded(), known_text_models():
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
