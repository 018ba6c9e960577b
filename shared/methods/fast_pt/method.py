"""FaST-PT: a global prompt on style-transferred embeddings, a domain prompt per domain, mixed for each image.

Style transfer (`style_transfer`) runs once on each client before its first task. In every round clients
then train P^G ``(m, d_t)`` and the domain classifier φ (linear, d_e→n) on their own and the transferred embeddings.
Each has a domain prompt P^D ``(m, d_t)`` too, which it sends after the last round only. From then on an image x is
classified with the text of [P^G, P^N, class], P^N = Σ_k g_k·P^D_k, g = softmax φ(I(x)) (`.domains`).

Rows of φ: a domain is its description's wording. The first ones are sorted by name; one that joins late appends a row
of zeros, so that no row ever moves. Which row is whose stands in the tensor ``domains``: a client's peers may change.

Source: Chen et al., "Multi-Modal Style Transfer-based Prompt Tuning for Efficient Federated Domain Generalization",
AAAI 2026, Eq. 1-8 and Algorithm 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from promptfed.shared.messages import Domain
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.fast_pt import domains
from promptfed.shared.methods.fast_pt.domains import (
    BIAS,
    DOMAINS,
    WEIGHT,
    Mixture,
    MixtureClassifier,
    has_rows,
    one_of,
    rows_for,
)
from promptfed.shared.methods.fast_pt.style_transfer import EmbeddedSplit, StyleTransfer, StyleTransferHyper
from promptfed.shared.seeds import Draws
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.arrays import namespace
from promptfed.shared.tensors.lazy import F, Tensor, torch

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone

GLOBAL = TensorSpec("global_prompt", ("m", "d_t"))
PROMPT = TensorSpec("domain_prompt", ("m", "d_t"))
PROMPTS = TensorSpec("domain_prompts", ("k", "m", "d_t"))  # none before the end
LISTED = TensorSpec("listed_domains", ("k",), "int64")  # whose they are


class FastPTHyper(pf.ContextHyper, StyleTransferHyper):
    """Both prompts are of length m. The switches are the paper's ablations (Table 3)."""

    m: int = pf.option(4, "vectors of the global prompt, and of a domain prompt", ge=1, le=64)
    classifier_learning_rate: float = pf.option(
        0.01, "rate of the domain classifier; the prompts' is training.learning_rate", gt=0, le=1000
    )
    mixture: Mixture = pf.option(
        "hard", "an image's domain prompt: its likeliest domain's, or the average by the classifier's softmax"
    )
    merge_domains: bool = pf.option(
        False, "let clients whose descriptions are the same be one domain, instead of refusing"
    )
    prompts: Literal["both", "global", "domain"] = pf.option(
        "both", "ablation: the global prompt alone, or the domain prompts (and the classifier) alone"
    )
    contrastive: bool = pf.option(True, "ablation: the contrastive term; without a global prompt there is none")
    mst: bool = pf.option(True, "ablation: style transfer; else the own embeddings only")
    target_descriptions: bool = pf.option(
        False, "ablation: transfer to the evaluators' domains too, for the global prompt"
    )


def contrastive_loss(prompt: Tensor, description: Tensor, general: Tensor) -> Tensor:
    """−log(e^{sim(P^D,t)} / (e^{sim(P^D,t)} + e^{sim(P^D,P^G)})) of token embeddings ``(·, d_t)`` (Eq. 6).

    sim is the cosine of the means over tokens.
    """

    def similarity(other: Tensor) -> Tensor:
        return F.cosine_similarity(prompt.mean(dim=0), other.mean(dim=0), dim=0)

    return F.softplus(similarity(general) - similarity(description))


class FastPT(pf.ContextMethod):
    """Two phases: ``global`` in every round, ``domain_prompts`` once, after the last."""

    name = "fast_pt"
    summary = "A global prompt on style-transferred embeddings, and domain prompts mixed for each image by its domain."
    paper = (
        "Chen et al., FaST-PT: Multi-Modal Style Transfer-based Prompt Tuning for Federated Domain Generalization, 2026"
    )
    unprotected = "it sends what depends on transforms trained without noise"
    Hyper = FastPTHyper
    hyper: FastPTHyper
    shared = GLOBAL
    needs = pf.Needs(domain_descriptions=True, join_when_extended=False)
    metrics = ("loss", "classifier_loss", "domain_loss", "mst_*")
    evaluation_metrics = (pf.SHARE + "*",)
    shares = ("mst_consistency_*",)
    defaults = pf.defaults(20, {"participation": {"min_clients": 2}}, epochs=5, batch_size=16, learning_rate=0.005)

    @property
    def _general(self) -> bool:
        return self.hyper.prompts != "domain"

    @property
    def _by_domain(self) -> bool:
        return self.hyper.prompts != "global"

    @property
    def disclosures(self) -> tuple[pf.Disclosed, ...]:
        """The description goes to all; with domain prompts the classifier's updates and the list at the end."""
        return (pf.AGGREGATE, domains.WORDS, *(domains.OF_DOMAIN_PROMPTS if self._by_domain else ()))

    # Server half

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """P^G, φ with whose each row is, and the list of domain prompts, which is empty before the end."""
        return (GLOBAL,) * self._general + (WEIGHT, BIAS, DOMAINS, PROMPTS, LISTED) * self._by_domain

    def phases(self, round: int, rounds: int) -> tuple[pf.Phase, ...]:
        """P^G and φ in every round; after the last one every trainer sends its domain prompt."""
        general, classifier = (GLOBAL,) * self._general, (WEIGHT, BIAS) * self._by_domain
        down = general + classifier + (DOMAINS,) * self._by_domain
        exchange = pf.Phase("global", down=down, up=general + classifier, mean=True)
        if round < rounds or not self._by_domain:
            return (exchange,)
        return exchange, pf.Phase("domain_prompts", down=general, up=(PROMPT,), ask="all")

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``m``, ``d_t``, ``d_e`` and the number n of domains; how many domain prompts there are is open."""
        width = pf.text_width(self.name, self.prompt_length, context)
        sizes = {"m": self.hyper.m, "d_t": width, "d_e": context.shape.d_e}
        return sizes | {"n": len(domains.trainer_domains(context.clients))}

    def admit(self, client: pf.ClientInfo, former: pf.ClientInfo | None, context: pf.ServerContext) -> None:
        """A trainer's description must say something, be no other's (unless merged), and stay what it was."""
        if former is not None and former.role != client.role:
            raise pf.MethodError(
                f"{client.name!r} took part as {former.role}: enrol the {client.role} under another name"
            )
        if client.role == "trainer":
            domains.check_description(client, former, context, self.hyper.merge_domains)

    def check_clients(self, context: pf.ServerContext) -> None:
        """Style transfer and the classifier need two domains."""
        present = domains.trainer_domains(context.clients)
        if len(present) < 2:
            words = " ".join(repr(domain.description) for domain in present.values())
            raise pf.MethodError(
                f"all trainers are of one domain, {words}: {self.name} needs a trainer of another domain"
            )

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """P^G from N(0, 0.02²), NeedsBackbone where it is made of words; φ is zero."""
        return (super().initial_state(context, draws) if self._general else {}) | self._classifier({}, context)

    def initial_state_with(self, backbone: Backbone, context: pf.ServerContext, draws: Draws) -> Tensors:
        """P^G made where a backbone is at hand; `adopt` gives φ its rows once the clients are known."""
        return super().initial_state_with(backbone, context, draws) | self._classifier({}, context)

    def adopt(self, state: Tensors, context: pf.ServerContext) -> Tensors:
        """φ with a row for each trainer's domain, the supplied one where there is one; no domain prompts."""
        # What is not a state of this method is left as it is, for the check that follows to refuse.
        return state | self._classifier(state, context) if has_rows(state) else state

    def _classifier(self, state: Tensors, context: pf.ServerContext) -> Tensors:
        """The part of a first state that is not P^G."""
        if not self._by_domain:
            return {}
        dims, xp = self.dims(context), context.draws().xp
        sizes = {WEIGHT.name: (0, dims["d_e"]), BIAS.name: (0,), PROMPTS.name: (0, dims["m"], dims["d_t"])}
        empty = {name: xp.zeros(size, dtype=xp.float32) for name, size in sizes.items()}
        nobody = xp.zeros(0, dtype=xp.int64)
        unfilled = {WEIGHT.name: empty[WEIGHT.name], BIAS.name: empty[BIAS.name], DOMAINS.name: nobody}
        none = {PROMPTS.name: empty[PROMPTS.name], LISTED.name: nobody}
        return rows_for(unfilled | state, list(domains.trainer_domains(context.clients))) | none

    def join(self, state: Tensors, client: pf.ClientInfo, context: pf.ServerContext) -> Tensors:
        """A trainer whose domain has no row yet appends one of zeros."""
        if not self._by_domain:
            return state
        rows = state[DOMAINS.name].tolist()
        return state | rows_for(state, rows + [key for key in domains.trainer_domains([client]) if key not in rows])

    def payload_tensors(self, phase: pf.Phase | None) -> tuple[TensorSpec, ...]:
        """What the phase needs; for an evaluation all there is."""
        return self.state_tensors() if phase is None else phase.down

    def aggregate(
        self, state: Tensors, phase: pf.Phase, updates: pf.Updates, combine: pf.Combine, context: pf.ServerContext
    ) -> Tensors:
        """``global``: the weighted mean. ``domain_prompts``: the list, one a domain (the mean of merged ones)."""
        if phase.name == "global":
            return state | combine(updates)
        domain_of = {client.name: key for client in context.clients for key in domains.trainer_domains([client])}
        sent: dict[int, list[pf.ClientUpdate]] = {}
        for update in updates:
            sent.setdefault(domain_of[update.client], []).append(update)
        listed = [key for key in state[DOMAINS.name].tolist() if key in sent]
        prompts = [one_of(sent[key], combine)[PROMPT.name] for key in listed]
        xp = namespace(prompts[0])
        return state | {PROMPTS.name: xp.stack(prompts), LISTED.name: xp.asarray(listed, dtype=xp.int64)}

    # Client half

    @property
    def prompt_length(self) -> int:
        """Of all prompts that may stand before a class name."""
        return self.hyper.m * (self._general + self._by_domain)

    def check_domain(self, backbone: Backbone, class_names: tuple[str, ...], domain: Domain) -> None:
        """The own description must fit with every class name, as it has to for the others."""
        pf.template_features(backbone, domain.description, class_names)

    def prepare(self, context: pf.ClientContext, private: Tensors) -> Tensors:
        """A transform to every other domain; those that are there stay as they are."""
        if not self.hyper.mst:
            return private
        transfer = StyleTransfer(context, self.hyper)
        for target in self._targets(context).values():
            if not transfer.has(private, target):
                private = private | transfer.train(target)
        return private

    def _targets(self, context: pf.ClientContext) -> dict[int, Domain]:
        """The domains to transfer to: the other trainers', and the evaluators' where the ablation wants them."""
        everybody = self.hyper.target_descriptions
        targets = domains.described_domains(context.peers) if everybody else domains.trainer_domains(context.peers)
        return {
            key: domain
            for key, domain in targets.items()
            if key != domains.own_key(context) and domains.fits(domain, context)
        }

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """A phase's epochs: the domain prompt under the global one that came down, then P^G and φ."""
        metrics: dict[str, float] = {}
        if self._by_domain and (context.round > 1 or context.phase == "domain_prompts"):
            # Algorithm 1 trains it after each round's aggregation: here that is the next task, or the last phase.
            prompt, metrics["domain_loss"] = self._train_domain_prompt(context, payload, private)
            private = private | {PROMPT.name: prompt}
        if context.phase == "domain_prompts":
            return pf.TrainResult({PROMPT.name: private[PROMPT.name]}, private, metrics)
        embedded = self._embedded(context, private)
        update: Tensors = {}
        if self._general:
            of_embeddings = replace(context, train=EmbeddedSplit.of(embedded.values()))
            update[GLOBAL.name], metrics["loss"] = pf.train_context(of_embeddings, payload[GLOBAL.name])
        if self._by_domain:
            classifier, metrics["classifier_loss"] = self._train_classifier(context, payload, embedded)
            update |= classifier
        private, reported = self._report(context, private)
        return pf.TrainResult(update, private, metrics | reported)

    def _embedded(self, context: pf.ClientContext, private: Tensors) -> dict[int, tuple[Tensor, Tensor]]:
        """By domain: embeddings ``(N, d_e)`` and labels ``(N,)``, the client's own first, then the transferred ones."""
        labels = context.train.labels
        pairs = {domains.own_key(context): (context.train.features(), labels)}
        if self.hyper.mst:
            transfer = StyleTransfer(context, self.hyper)
            pairs |= {key: (transfer.apply(private, other), labels) for key, other in self._targets(context).items()}
        return pairs

    def _train_classifier(
        self, context: pf.ClientContext, payload: Tensors, embedded: dict[int, tuple[Tensor, Tensor]]
    ) -> tuple[Tensors, float]:
        """E epochs of φ on the embeddings of all domains that have a row (Eq. 8); φ and the last epoch's loss."""
        row_of = {key: row for row, key in enumerate(payload[DOMAINS.name].tolist())}
        if domains.own_key(context) not in row_of:
            raise pf.MethodError(
                f"the federation does not know the domain of {context.client!r}: enrol under another name"
            )
        of_rows = {key: pair for key, pair in embedded.items() if key in row_of}
        split = EmbeddedSplit.of((values, torch.full_like(own, row_of[key])) for key, (values, own) in of_rows.items())
        values, rows = split.values, split.labels.to(split.values.device)
        weight, bias = (pf.leaf(payload[spec.name], context.backbone) for spec in (WEIGHT, BIAS))

        def loss(indices: Tensor) -> Tensor:
            some = pf.sent_to(indices, values.device)
            return F.cross_entropy(F.linear(values[some], weight, bias), rows[some])

        training = context.training.model_copy(update={"learning_rate": self.hyper.classifier_learning_rate})
        final = pf.train(replace(context.with_terms(training=training), train=split), [weight, bias], loss)
        return {WEIGHT.name: weight, BIAS.name: bias}, final

    def _train_domain_prompt(
        self, context: pf.ClientContext, payload: Tensors, private: Tensors
    ) -> tuple[Tensor, float]:
        """E epochs of P^D on own embeddings under the fixed P^G (Eq. 6); P^D and the last epoch's loss."""
        backbone, domain = context.backbone, domains.own_domain(context)
        general = payload[GLOBAL.name].to(backbone.device) if self._general else None
        learned = pf.leaf(self._domain_prompt(context, private), backbone)
        words = backbone.embed_words(domain.description.replace("{}", " "))
        prompts = pf.class_prompts(context, self.hyper.m * (1 + self._general))
        cross_entropy = pf.BatchCrossEntropy(context)

        def loss(indices: Tensor) -> Tensor:
            if general is None:
                return cross_entropy(indices, backbone.encode_prompts(learned, prompts))
            value = cross_entropy(indices, backbone.encode_prompts(torch.cat([general, learned]), prompts))
            return value + contrastive_loss(learned, words, general) if self.hyper.contrastive else value

        # Batches of its own, since P^G's are drawn for the same task.
        final = pf.train(replace(context, phase=f"{context.phase}/{PROMPT.name}"), [learned], loss)
        return learned, final

    def _domain_prompt(self, context: pf.ClientContext, private: Tensors) -> Tensor:
        """``(m, d_t)`` this client's domain prompt, or the start that all clients have in common."""
        if PROMPT.name in private:
            return private[PROMPT.name]
        shape = self.hyper.m, context.backbone.d_t
        return torch.randn(shape, generator=pf.generator(context.seed, PROMPT.name)) * pf.INIT_STD

    def _report(self, context: pf.ClientContext, private: Tensors) -> tuple[Tensors, dict[str, float]]:
        """What style transfer achieved, reported once with the first update after it."""
        metrics: dict[str, float] = {}
        if self.hyper.mst:
            metrics |= {f"mst_too_long[{name}]": 1.0 for name in domains.too_long(context)}
            transfer = StyleTransfer(context, self.hyper)
            for target in self._targets(context).values():
                report = transfer.report(private, target)
                metrics |= {f"mst_{figure}[{target.name}]": number for figure, number in report.items()}
                private = transfer.without_report(private, target)
        return private, metrics

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """At the end the mixture. Before, a trainer's own domain prompt behind P^G, and P^G alone for all others."""
        if self._ended(payload):
            return self._mixture(context, payload, self.hyper.mixture)
        general = [payload[GLOBAL.name]] if self._general else []
        special = [self._domain_prompt(context, private)] if not general or PROMPT.name in private else []
        whole = torch.cat(general + special)
        return pf.TextPromptClassifier(context, whole)

    def variants(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> dict[str, pf.Classifier]:
        """``global``: P^G alone, where the classifier is more; ``hard``: the hard mixture beside the soft one."""
        ended = self._ended(payload)
        classifiers: dict[str, pf.Classifier] = {}
        if self._general and self._by_domain and (ended or PROMPT.name in private):
            classifiers["global"] = pf.TextPromptClassifier(context, payload[GLOBAL.name])
        if ended and self.hyper.mixture == "soft":
            classifiers["hard"] = self._mixture(context, payload, "hard")
        return classifiers

    def _ended(self, payload: Tensors) -> bool:
        return self._by_domain and len(payload[LISTED.name]) > 0

    def _mixture(self, context: pf.ClientContext, payload: Tensors, mixture: Mixture) -> MixtureClassifier:
        row_of = {key: row for row, key in enumerate(payload[DOMAINS.name].tolist())}
        rows = [row_of[key] for key in payload[LISTED.name].tolist()]
        weight, bias = payload[WEIGHT.name][rows], payload[BIAS.name][rows]
        general = payload[GLOBAL.name] if self._general else None
        names = domains.domain_names(payload[LISTED.name].tolist(), context.peers, context.domain)
        return MixtureClassifier(context, general, payload[PROMPTS.name], weight, bias, mixture, names)
