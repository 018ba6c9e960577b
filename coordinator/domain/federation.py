"""A federation in memory: what requests need, without queries to the database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NoReturn

from promptfed.coordinator.domain.round_machine import steps_of
from promptfed.coordinator.domain.run_state import PhasePlan, Rules, Run
from promptfed.shared.messages import EnrolledProtection, Peer, Role, TaskKind
from promptfed.shared.methods import method_for
from promptfed.shared.methods.core.costs import update_limit
from promptfed.shared.methods.core.interface import (
    ClientInfo,
    Hyperparameters,
    Method,
    MethodError,
    Phase,
    ServerContext,
)
from promptfed.shared.methods.core.refusals import least_updates
from promptfed.shared.plain_text import quoted, shortened
from promptfed.shared.spec.sections import PrivacySpec
from promptfed.shared.spec.spec import BackboneShape, FederationSpec, SpecError
from promptfed.shared.spec.training_terms import TrainingTerms

SAME_CLASSES = (
    "give them the same names, or create the federation with class_names, which lists them all, "
    "or with method.label_space: client, where each client has classes of its own"
)


@dataclass(frozen=True, kw_only=True)
class Client(ClientInfo):
    """An enrolled client; ``secret_digest`` is None after a reset. ``identity_key``: with which it signs, in hex.

    ``protection``: how it will train under differential privacy, by its own word.
    """

    id: str
    secret_digest: str | None
    identity_key: str | None = None
    protection: EnrolledProtection | None = None

    @property
    def units(self) -> int | None:
        """The number of protected records or groups that the client enrolled with; None if it gave none."""
        return self.protection.units if self.protection is not None else None

    def peer(self) -> Peer:
        """The client as other clients see it."""
        return Peer(name=self.name, role=self.role, domain=self.domain)


@dataclass(frozen=True)
class EnrolmentToken:
    """An enrolment token. ``uses``: how many clients may enrol with it.

    ``client``: the one reset name that it is for. ``closed``: nobody new comes in by it any more.
    ``expired``: it was seen to have expired, whatever the clock says now.
    """

    id: str
    name: str
    expires: datetime
    uses: int = 1
    used: int = 0
    role: Role | None = None
    client: str | None = None
    closed: bool = False
    expired: bool = False

    @property
    def is_used_up(self) -> bool:
        """Whether the allowed number of clients have enrolled with it."""
        return self.used >= self.uses


@dataclass(frozen=True)
class OpenTask:
    """An unanswered task of the open stage. It is served once it has a payload."""

    id: str
    client: str
    kind: TaskKind
    round: int
    step: int
    phase: str
    payload_sha256: str | None = None
    payload_bytes: int = 0
    opened_at: str = ""


class LastContext:
    """A cache of the last context, by the identity of the objects that it was made of: these are immutable."""

    def __init__(self) -> None:
        self._last: tuple[tuple[object, ...], ServerContext] | None = None

    def get(self, made_of: tuple[object, ...]) -> ServerContext | None:
        """The context, if it was made of the same objects."""
        last = self._last
        if last is None or any(one is not other for one, other in zip(last[0], made_of, strict=True)):
            return None
        return last[1]

    def set(self, made_of: tuple[object, ...], context: ServerContext) -> None:
        """Cache ``context``. Simultaneous calls give equal contexts, so any of them may win."""
        self._last = made_of, context


@dataclass(frozen=True)
class Federation:
    """One federation after a commit. Each commit replaces the whole object, so that readers see a consistent state.

    ``starting``: its initial state is being computed for the enrolled clients; meanwhile no client can enrol.
    ``sampling_key``: the secret of Poisson sampling, never disclosed.
    ``named``: the different classes that clients have named, which have ``named_bytes`` of text.
    """

    id: str
    name: str
    spec: FederationSpec
    method: Method
    rules: Rules
    run: Run
    fingerprint: str | None = None
    shape: BackboneShape | None = None
    supplied_state: str | None = None
    draw_secret: str | None = None
    sampling_key: str | None = None
    clients: dict[str, Client] = field(default_factory=dict)
    by_secret: dict[str, Client] = field(default_factory=dict)
    tasks: dict[str, OpenTask] = field(default_factory=dict)
    tokens: dict[str, EnrolmentToken] = field(default_factory=dict)  # by digest
    deadline: str | None = None
    starting: bool = False
    named: frozenset[str] = frozenset()
    named_bytes: int = 0
    _last_context: LastContext = field(default_factory=LastContext, repr=False, compare=False)

    @property
    def absent(self) -> str | None:
        """Why the federation stands still: its method is not here, or its rows cannot be read. None if it does not."""
        return self.method.why if isinstance(self.method, AbsentMethod) else None

    @property
    def privacy(self) -> PrivacySpec | None:
        """The privacy settings; None at level ``none``."""
        return self.spec.privacy if self.spec.privacy.level != "none" else None

    def training_terms(self) -> TrainingTerms:
        """The terms of training, as offered to clients and repeated in every task."""
        reference = {"fingerprint": self.fingerprint, "shape": self.shape}
        return TrainingTerms.of(self.spec, backbone=self.spec.backbone.model_copy(update=reference))

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The spec's classes, else those that all its trainers have named; None before the start, or where they differ.

        Trainers name the same classes in any order; the first by name gives it.
        """
        if self.spec.class_names is not None:
            return tuple(self.spec.class_names)
        trainers = (name for name, member in self.run.members.items() if member.joined and member.role == "trainer")
        named = [self.clients[name].class_names for name in sorted(trainers)]
        same = all(names == named[0] or set(names) == set(named[0]) for names in named)
        return named[0] if named and same else None

    @property
    def may_differ(self) -> bool:
        """Whether trainers may have different classes: the spec says so, lists them all, or nobody trains."""
        spec = self.spec
        return spec.class_names is not None or spec.rounds == 0 or spec.method.get("label_space") == "client"

    @property
    def class_differences(self) -> str | None:
        """How the class names of those who would start differ, where they may not; else None."""
        named = {name: self.clients[name].class_names for name in self.run.starters(self.rules)}
        return None if self.may_differ else differing(named)

    @property
    def phase(self) -> str | None:
        """The name of the open or closing stage."""
        return self.run.stage.name if self.run.stage is not None else None

    def context(self, names: list[str] | None = None) -> ServerContext:
        """The context of the method's server half. Its clients are ``names``, or all that the state includes."""
        if names is not None:
            return self._context(names)
        # One object as long as it would come out the same: each update of a phase is looked at beside it.
        made_of = (self.spec, self.shape, self.clients, self.run.members)
        context = self._last_context.get(made_of)
        if context is None:
            context = self._context([name for name, member in self.run.members.items() if member.joined])
            self._last_context.set(made_of, context)
        return context

    @property
    def update_limit(self) -> int:
        """The maximum size of an update in bytes: the spec's, or what follows from the method."""
        if self.shape is None:
            return self.spec.admission.max_bytes
        return update_limit(self.spec, self.method, self.context())

    def _context(self, names: list[str]) -> ServerContext:
        assert self.shape is not None, "nobody has enrolled, so nobody has said what the backbone looks like"
        return ServerContext(
            training=self.spec.training,
            shape=self.shape,
            class_names=tuple(self.spec.class_names) if self.spec.class_names is not None else None,
            clients=tuple(self._info(name) for name in sorted(names)),
            seed=self.spec.seed,
            rounds=self.spec.rounds,
        )

    def drawing_with(self, secret: str | None) -> Federation:
        """This federation with sampling from ``secret``; None: from its spec's seed."""
        draw = self.spec.seed if secret is None else secret
        return replace(self, draw_secret=secret, rules=replace(self.rules, draw=draw))

    def sampling_with(self, key: str | None, budget_rounds: int | None) -> Federation:
        """This federation with Poisson sampling by ``key`` (None: fixed), and the rounds of its privacy budget."""
        rules = replace(self.rules, poisson_key=key, budget_rounds=budget_rounds)
        return replace(self, sampling_key=key, rules=rules)

    def _info(self, name: str) -> ClientInfo:
        """A client as a method sees it, with its current ``active``."""
        client, member = self.clients[name], self.run.members.get(name)
        return client if member is None or member.active else replace(client, active=False)

    def peers(self) -> list[Peer]:
        """The active clients that the state includes, in order of name."""
        return [
            self.clients[name].peer()
            for name, member in sorted(self.run.members.items())
            if member.active and member.joined
        ]

    def method_phase(self, round: int, step: int) -> Phase:
        """The method's phase at ``step`` of ``round``."""
        plan = self.rules.plan(round, step)
        number = step if plan is None or plan.secure is None else plan.secure.number
        return self.method.phases(round, self.spec.rounds)[number]

    def with_named(self, class_names: Iterable[str]) -> Federation:
        """This federation with ``class_names`` added to those that clients have named."""
        new = set(class_names) - self.named
        return replace(self, named=self.named | new, named_bytes=self.named_bytes + text_bytes(new)) if new else self

    def recounted(self) -> Federation:
        """This federation with only the classes that its active clients have named."""
        named: set[str] = set()
        for client in self.clients.values():
            if self.run.members[client.name].active:
                named.update(client.class_names)
        return replace(self, named=frozenset(named), named_bytes=text_bytes(named))

    def with_clients(self, *clients: Client) -> Federation:
        """This federation with ``clients`` added or replaced."""
        by_name, by_secret = dict(self.clients), dict(self.by_secret)
        for client in clients:
            before = by_name.get(client.name)
            if before is not None and before.secret_digest is not None:
                del by_secret[before.secret_digest]
            if client.secret_digest is not None:
                by_secret[client.secret_digest] = client
            by_name[client.name] = client
        return replace(self, clients=by_name, by_secret=by_secret)


def differing(named: Mapping[str, tuple[str, ...]]) -> str | None:
    """The class names of trainers side by side where they differ; None where all have the same."""
    trainers: dict[frozenset[str], list[str]] = {}
    for name in sorted(named):
        trainers.setdefault(frozenset(named[name]), []).append(name)
    if len(trainers) < 2:
        return None
    common, all_names = frozenset[str].intersection(*trainers), frozenset[str]().union(*trainers)
    groups = sorted(trainers.items(), key=lambda group: (-len(group[1]), group[1]))
    classes = [shortened(quoted(sorted(theirs - common), all_names), 8) for theirs, _ in groups]
    sides = [
        f"{shortened(names, 3)}: {theirs or 'no more'}" for theirs, (_, names) in zip(classes, groups, strict=True)
    ]
    beside = f" beside {len(common)} that all have" if common else ""
    return f"the trainers' class names differ{beside} ({shortened(sides, 4, ' | ')})"


def text_bytes(names: Iterable[str]) -> int:
    """Bytes of the names in UTF-8."""
    return sum(len(name.encode()) for name in names)


def rules_of(spec: FederationSpec, method: Method) -> Rules:
    """The rules of the round machine for a spec."""
    part = spec.participation

    def phases(round: int) -> tuple[PhasePlan, ...]:
        plans = tuple(PhasePlan(phase.name, phase.ask) for phase in method.phases(round, spec.rounds))
        return plans if spec.secure_aggregation is None else steps_of(plans, spec.secure_aggregation)

    return Rules(
        draw=spec.seed,
        rounds=spec.rounds,
        min_clients=part.min_clients,
        fraction=part.fraction,
        quorum=part.quorum,
        deadline_seconds=part.deadline_seconds,
        on_missed_quorum=part.on_missed_quorum,
        evaluate_every=spec.evaluation.every,
        phases=phases,
        join_when_extended=method.needs.join_when_extended
        and spec.secure_aggregation is None
        and part.sampling == "fixed",
        secure=spec.secure_aggregation,
        fixed_divisor=spec.privacy.protects_clients,
        selects=spec.selection is not None,
        least_answers=least_updates(spec.aggregation),
        patience=spec.stop.patience if spec.stop is not None else None,
    )


def _refuse(self: AbsentMethod, *arguments: object, **named: object) -> NoReturn:
    raise MethodError(self.why)


class AbsentMethod(Method):
    """Replaces a method whose package is missing or broken, or that of a federation whose rows cannot be read.

    Its federation stands still; others continue.
    """

    name = "absent"
    aggregate = classifier = dims = initial_state = phases = state_tensors = train = _refuse

    def __init__(self, why: str):
        super().__init__(Hyperparameters())
        self.why = why


def kept_method(spec: FederationSpec) -> Method:
    """The method of an existing federation; an `AbsentMethod` if it is not available."""
    try:
        return method_for(spec)
    except SpecError as error:
        return AbsentMethod(str(error))
    except Exception as error:  # a package's own code may raise anything
        return AbsentMethod(f"it cannot be made of the spec any more ({type(error).__name__}: {error})")


def new_federation(id: str, spec: FederationSpec) -> Federation:
    """A new federation, without clients."""
    return federation_of(id, spec, method_for(spec))


def federation_of(id: str, spec: FederationSpec, method: Method) -> Federation:
    """A federation with nothing but its spec."""
    backbone = spec.backbone
    return Federation(
        id=id,
        name=spec.name,
        spec=spec,
        method=method,
        rules=rules_of(spec, method),
        run=Run(),
        fingerprint=backbone.fingerprint,
        shape=backbone.shape,
    )
