"""FedAvg: the image tower itself is fine-tuned by every client in turn, and the changes averaged."""

from __future__ import annotations

from promptfed.shared.methods.weights import WeightMethod


class FedAvg(WeightMethod):
    """Fine-tuning of the image tower, all of it or a part, under the template's text or a shared linear head.

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017, as the
    rows FedAvg in the tables of pFedPG, PLAN and FaST-PT, of which none gives rate, head or epochs. The weight decay
    is towards zero, of the weights and not of their change, which would be FedProx towards the frozen backbone.
    """

    name = "fedavg"
    summary = "The image tower's own weights, all or a part, fine-tuned by each client and averaged."
    paper = "McMahan et al., Communication-Efficient Learning of Deep Networks (FedAvg), 2017"
