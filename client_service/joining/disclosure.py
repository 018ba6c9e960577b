"""What taking part means and what will leave this machine: shown before anything is sent, downloaded or computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from promptfed.client_service.privacy.agreement import ROUNDS, AgreedTerms, phases_of
from promptfed.client_service.privacy.policy import STATES
from promptfed.client_service.privacy.protection import PrivacyPlan
from promptfed.client_service.training.payloads import known_sizes
from promptfed.shared.data.pixels import Scale
from promptfed.shared.messages import Domain, EnrolmentInfo, Role
from promptfed.shared.methods import MULTI_LABEL, TASK
from promptfed.shared.methods.core.interface import Disclosed, Method
from promptfed.shared.plain_text import counted, plain, scale_text
from promptfed.shared.spec.sections import PrivacySpec
from promptfed.shared.spec.spec import BackboneShape
from promptfed.shared.tensors import TensorSpec
from promptfed.shared.tensors.torch_tensors import DTYPES
from promptfed.shared.versions import RELEASE, SYSTEM

EACH, SOME = "in each round in which it is asked", "in round"
NAMES = 6  # class names that are shown
FIGURES = {
    "ece": "how far its confidence is from its accuracy (ECE, one number, to four places)",
    "macro_f1": "the mean over the classes of how well each is told (macro-F1, one number, to four places)",
    "auroc": "the mean over the classes of how well their images are ranked (AUROC, one number, to four places)",
    "majority": "the share of the most frequent class among the test images (one number, to four places)",
    "one_answer": "the share of the most frequent class among the answers (one number, to four places)",
    "zero_shot_ece": "the template's ECE",
}
LONG = 300  # characters of what a coordinator may say in one line

NEVER = (
    "images, file names and folders, the labels of single images, image features as such, and what the method keeps "
    "private (`promptfed methods NAME` lists what it sends; everything else is)"
)
KEY = "public, made here: the others in a sum know this client's signature by it, and not its name"
UPDATES = "what can be computed from each update: gradients of images have been turned back into images"


@dataclass(frozen=True)
class Declared:
    """What the coordinator is told when this client enrols. ``fingerprint``: of the weights, once they are here."""

    name: str
    role: Role
    num_samples: int
    class_names: tuple[str, ...]
    domain: Domain | None
    device: str
    fingerprint: str | None
    release: str = RELEASE
    system: str = SYSTEM
    grey: Scale | None = None


@dataclass(frozen=True)
class SentTensor:
    """One tensor of an update. A size that is not known yet is shown as its symbol, and ``bytes`` is None."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    bytes: int | None


@dataclass(frozen=True)
class Exchange:
    """The tensors that go up in one phase, and when."""

    phase: str
    when: str
    tensors: tuple[SentTensor, ...]


@dataclass(frozen=True)
class Disclosure:
    """All that the coordinator and other sites will learn of this client, and what it will do for them.

    ``changes``: in what the offer is not the one that was agreed to before; empty where none was. ``limits``: the
    site's disclosure floor, and how many states it answers on one test set under it.
    """

    terms: AgreedTerms
    declared: Declared
    exchanges: tuple[Exchange, ...]
    disclosed: tuple[Disclosed, ...]
    changes: tuple[str, ...] = ()
    plan: PrivacyPlan | None = None
    limits: tuple[int, int] = (1, STATES)

    def facts(self) -> dict[str, Any]:
        """The disclosure as JSON for programs."""
        domain = self.declared.domain.model_dump() if self.declared.domain else None
        declared = asdict(self.declared) | {"domain": domain, "class_names": list(self.declared.class_names)}
        if declared["grey"] is None:
            del declared["grey"]  # as in the request
        return {
            "coordinator": self.terms.coordinator,
            "federation": self.terms.federation,
            "method": self.terms.method["name"],
            "terms": self.terms.model_dump(mode="json"),
            "agree": self.terms.digest,
            "changes": list(self.changes),
            "declared": declared,
            "exchanges": [asdict(exchange) for exchange in self.exchanges],
            "learned": [asdict(disclosed) for disclosed in self.disclosed],
            "test_sets": list(self._tests),
            "floor": self.limits[0],
            "states": self.limits[1] if self.limits[0] > 1 else None,
            "never": NEVER,
            **({} if self.plan is None else {"privacy": vars(self.plan)}),
        }

    @property
    def _tests(self) -> tuple[str, ...]:
        tests = "its test images"
        if self.terms.selection is not None:
            share = f"{self.terms.selection.share:.0%} of the training images, which are held out"
            tests = f"{share}, and once at the end its test images"
        return (tests, *self.terms.accuracies[1:])

    def lines(self) -> list[str]:
        """For people. Texts of others are shown as plain text, and cut off if they are long."""
        terms = self.terms
        name = terms.method["name"]
        return [_line(line) for line in (
            *self._changed(),
            f'To join the federation "{terms.federation}" (method {name}) at {terms.coordinator}:',
            "",
            "What this machine will do, and nothing else (a task that differs is refused):",
            *(f"  {name:<9} {value}" for name, value in self._work()),
            "Leaves this machine once, when it enrols:",
            *(f"  {name:<9} {value}" for name, value in self._once()),
            *(line for exchange in self.exchanges for line in self._exchange(exchange)),
            *self._measured(),
            "Who learns what of it:",
            *self._learned(),
            f"Never leaves it: {NEVER}.",
            f"Agreeing to just this without being asked: --agree {terms.digest}",
        )]  # fmt: skip

    def _measured(self) -> list[str]:
        kind = self.terms.evaluation or (self.terms.privacy.evaluations if self.terms.privacy is not None else "plain")
        if kind == "withheld":
            return ["Leaves it after an evaluation:", "  nothing   but that it was made: accuracies are withheld"]
        if self.terms.privacy is not None and self.terms.privacy.evaluations == "noisy":
            a = self.terms.privacy.evaluation_epsilon
            text = f"as numbers of right answers with noise, ε = {a:g} each out of the test images' own budget"
            return [
                "Leaves it after an evaluation:",
                f"  accuracy  on {', '.join(self._tests)}, {text}",
                *self._states(),
            ]
        floor = self.limits[0]
        if floor > 1 and self.terms.method.get(TASK) == MULTI_LABEL:
            text = "but that it was made: of several labels no figure leaves under this site's floor"
            return ["Leaves it after an evaluation:", f"  nothing   {text}"]
        if floor > 1:
            return [
                "Leaves it after an evaluation:",
                f"  accuracy  on {', '.join(self._tests)}, with the number of images, and the template's beside it,",
                f"            all from ranges of {floor} images; nothing of a test set of fewer than {2 * floor}",
                *self._states(),
            ]
        return [
            "Leaves it after an evaluation:",
            f"  accuracy  on {', '.join(self._tests)}, with the number of images, and the template's beside it",
            *(f"            {FIGURES[name]}" for name in self.terms.figures),
            "            seconds of computing; where the method mixes domains, their mean shares over the test images",
        ]

    def _states(self) -> list[str]:
        """How many states are answered under the site's floor, beside those that the federation may ask for."""
        floor, most = self.limits
        if floor <= 1:
            return []
        rounds = 1 + -(-self.terms.rounds // self.terms.evaluate_every)
        last = ", the last round's among them" if rounds > most else ""
        return [
            f"            of at most {most} states on one test set (metrics.states){last}; {rounds} may be asked for"
        ]

    def _changed(self) -> list[str]:
        if not self.changes:
            return []
        return ["THIS IS NOT WHAT YOU AGREED TO BEFORE:", *(f"  {change}" for change in self.changes), ""]

    def _work(self) -> list[tuple[str, str]]:
        terms = self.terms
        classes = f"{len(terms.class_names)} of the federation's" if terms.class_names else "this client's own"
        backbone = terms.backbone
        weights = backbone.pretrained or "random"
        work = [("backbone", f"{backbone.model} with weights {weights}, {backbone.precision}")]
        if terms.role == "trainer":
            work += [
                ("rounds", f"up to {terms.rounds}"),
                ("method", _settings(terms.method) or "no settings"),
                ("training", _settings(terms.training.model_dump())),
                ("seed", f"{terms.seed}, which batches and crops follow from"),
            ]
        if self.plan is not None:
            work += self.plan.lines()
        if terms.privacy is not None and terms.privacy.protects_clients:
            work += [("privacy", _central(terms.privacy))]
        if terms.secure_aggregation is not None:
            least = terms.secure_aggregation.minimum
            text = f"changes leave under masks; the operator learns sums of at least {least} clients"
            content = "a key" if _weighs_alike(terms) else "a key and the number of training images"
            work += [("sums", f"{text}; other sites learn {content}, no name")]
        template = f"{terms.template!r}" if terms.template else "the data's own"
        work += [("classes", f"told apart among {classes}; template {template}")]
        if terms.most_peers:
            text = f"names, roles and domain descriptions of at most {counted(terms.most_peers, 'client')} are used"
            work += [("clients", f"{text}; they change as clients join and leave")]
        if terms.compression.up != "none" and self.exchanges:
            work += [("sending", f"changes from what was received, rounded at random to {terms.compression.up}")]
        return [
            *work,
            ("evaluate", f"every {counted(terms.evaluate_every, 'round')}, before the first and after the last"),
        ]

    def _once(self) -> list[tuple[str, str]]:
        declared = self.declared
        names = ", ".join(declared.class_names[:NAMES])
        more = f" and {len(declared.class_names) - NAMES} more" if len(declared.class_names) > NAMES else ""
        domain = f"{declared.domain.name}: {declared.domain.description!r}" if declared.domain else "none declared"
        kind = "training" if declared.role == "trainer" else "test"
        weights = "the fingerprint of its weights" + (" once they are here" if declared.fingerprint is None else "")
        mark = f"{declared.fingerprint[:19]}..., " if declared.fingerprint is not None else ""
        return [
            ("name", declared.name),
            ("role", declared.role),
            ("images", f"{declared.num_samples}, the number of {kind} images"),
            ("classes", f"{len(declared.class_names)}: {names}{more}"),
            ("domain", domain),
            ("backbone", f"{mark}{weights}, and its towers' sizes"),
            *([("grey", f"pictures of more than 8 bits read as {scale_text(declared.grey)}")] if declared.grey else []),
            ("device", declared.device),
            ("release", f"{declared.release} of promptfed, on {declared.system}"),
            ("secret", "random, made here: by it the coordinator knows this client again"),
            *([("key", KEY)] if self.terms.secure_aggregation is not None and declared.role == "trainer" else []),
        ]

    def _exchange(self, exchange: Exchange) -> list[str]:
        summed = self.terms.secure_aggregation is not None
        how = " as a part of a sum that nobody sees into, 64 bits a number" if summed else ""
        lines = [f"Leaves it {exchange.when}{how} (phase {exchange.phase}):"]
        for tensor in exchange.tensors:
            size = f"{tensor.bytes:,} bytes" if tensor.bytes is not None else "bytes by the sizes not known yet"
            lines.append(f"  tensor    {tensor.name} ({', '.join(map(str, tensor.shape))}) {tensor.dtype}, {size}")
        sizes = [tensor.bytes for tensor in exchange.tensors if tensor.bytes is not None]
        if len(sizes) == len(exchange.tensors) > 1:
            lines.append(f"            {sum(sizes):,} bytes in all")
        if not summed and self.terms.privacy is None:
            lines += ["  progress  while it trains: the part of its steps that is done"]
        return [*lines, f"  metrics   {', '.join(self.terms.metrics) or 'none'}"]

    def _learned(self) -> list[str]:
        operator = [disclosed.what for disclosed in self.disclosed if disclosed.to == "operator"]
        sites = [disclosed.what for disclosed in self.disclosed if disclosed.to == "sites"]
        everything = "the operator: all of the above"
        summed = self.terms.secure_aggregation
        if self.exchanges and summed is not None:
            everything += f"; of the changes nothing but sums of at least {summed.minimum} clients"
        elif self.exchanges:
            everything += f", and {UPDATES}"
        lines = [everything, *(f"the operator: {fact}" for fact in operator)]
        lines += [f"every other site: {fact}" for fact in sites] or ["other sites: nothing"]
        return [f"  {line}" for line in lines]


def _line(text: str) -> str:
    shown = plain(text)
    return shown if len(shown) <= LONG + len(NEVER) else shown[: LONG + len(NEVER)] + "..."


def _central(privacy: PrivacySpec) -> str:
    most = "" if privacy.epsilon is None else f", ε = {privacy.epsilon:g} at most"
    noise = f"noise of {privacy.noise_multiplier:g} times the clip {privacy.clip:g}{most} at δ = {privacy.delta:g}"
    return f"the operator sees every update, and adds {noise}: whoever gets the prompts learns little of any one client"


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {str(value)[:LONG]}" for key, value in settings.items() if key != "name")


def disclose(
    terms: AgreedTerms,
    info: EnrolmentInfo,
    method: Method,
    declared: Declared,
    shape: BackboneShape | None,
    changes: Sequence[str] = (),
    plan: PrivacyPlan | None = None,
    limits: tuple[int, int] = (1, STATES),
) -> Disclosure:
    """What ``declared`` and the method's phases send; an evaluator sends accuracies alone.

    ``shape``: the backbone's where it is known, else the tensors' sizes stand as symbols.
    """
    trains = declared.role == "trainer"
    exchanges = _exchanges(method, info, shape) if trains else ()
    facts = tuple(fact for fact in method.disclosures if trains or fact.to == "sites") if exchanges else ()
    return Disclosure(terms, declared, exchanges, facts, tuple(changes), plan, limits)


def _exchanges(method: Method, info: EnrolmentInfo, shape: BackboneShape | None) -> tuple[Exchange, ...]:
    names = tuple(info.class_names) if info.class_names else None
    sizes = known_sizes(method, shape, names) if shape is not None else {}
    return tuple(
        Exchange(name, _when(rounds), tuple(_sent(spec, sizes) for spec in phase.up))
        for name, (phase, rounds) in phases_of(method).items()
    )


def _when(rounds: list[int]) -> str:
    if len(rounds) == ROUNDS:
        return EACH
    if rounds == [1]:
        return "before the first round"
    return "after the last round" if rounds == [ROUNDS] else f"{SOME} {rounds[0]} and later"


def _sent(spec: TensorSpec, sizes: dict[str, int]) -> SentTensor:
    shape = tuple(sizes.get(size, size) if isinstance(size, str) else size for size in spec.shape)
    numbers = [size for size in shape if isinstance(size, int)]
    whole = prod(numbers) * DTYPES[spec.dtype].itemsize if len(numbers) == len(shape) else None
    return SentTensor(spec.name, shape, spec.dtype, whole)


def _weighs_alike(terms: AgreedTerms) -> bool:
    return terms.weighting is not None and terms.weighting.is_uniform
