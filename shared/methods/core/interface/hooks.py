"""Optional hooks of a method for clients that enrol, join or leave, and for work before training.

A method implements a hook by defining the member. The caller checks with ``isinstance``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from promptfed.shared.messages import Domain
from promptfed.shared.methods.core.interface.base import ClientContext, ClientInfo, Method, MethodError, ServerContext
from promptfed.shared.methods.core.interface.classifiers import Classifier
from promptfed.shared.tensors import Tensors

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone


@runtime_checkable
class AdoptsStates(Protocol):
    """A method whose initial state depends on the clients."""

    def adopt(self, state: Tensors, context: ServerContext) -> Tensors:
        """The supplied ``state`` of round 0, fitted to the clients of ``context``."""


@runtime_checkable
class ChoosesClients(Protocol):
    """A method in which not every client can take part."""

    def admit(self, client: ClientInfo, former: ClientInfo | None, context: ServerContext) -> None:
        """Raise MethodError if ``client`` cannot enrol in addition to the active clients of ``context``.

        ``former``: the client's earlier record if it returns under its name after a reset.
        """


@runtime_checkable
class ChecksClients(Protocol):
    """A method that cannot start with every set of clients."""

    def check_clients(self, context: ServerContext) -> None:
        """Raise MethodError if a federation cannot start with the clients of ``context``."""


@runtime_checkable
class GrowsWithClients(Protocol):
    """A method whose state has a part for each client or domain."""

    def join(self, state: Tensors, client: ClientInfo, context: ServerContext) -> Tensors:
        """The state after ``client`` joined a federation that has started."""


@runtime_checkable
class ForgetsClients(Protocol):
    """A method whose state stores data of single clients."""

    def forget(self, state: Tensors, client: ClientInfo, context: ServerContext) -> Tensors:
        """The state without the data of ``client``, whose updates are deleted; the same object if there are none.

        Aggregates to which other clients contributed stay unchanged.
        """


@runtime_checkable
class ReadsDomains(Protocol):
    """A method that uses a client's domain description in texts."""

    def check_domain(self, backbone: Backbone, class_names: tuple[str, ...], domain: Domain) -> None:
        """Raise BackboneError if the description of the client's ``domain`` is too long for these texts."""


@runtime_checkable
class Prepares(Protocol):
    """A method whose clients compute something before their first training."""

    def prepare(self, context: ClientContext, private: Tensors) -> Tensors:
        """Private state before training; computed once, and again when the peers change."""


@runtime_checkable
class Retargets(Protocol):
    """A tuned classifier that can serve other candidate classes without being tuned again."""

    def among(self, context: ClientContext) -> Classifier:
        """The same classifier over ``context.class_names``."""


def check_admission(
    method: Method, client: ClientInfo, former: ClientInfo | None, others: Callable[[], ServerContext]
) -> None:
    """Raise MethodError if ``client`` cannot enrol in addition to the active clients of ``others()``.

    ``others`` is called only if the method needs them, since there may be many.
    """
    if client.role == "evaluator" and not method.takes_evaluators:
        raise MethodError(
            f"{method.name} classifies with what each client trains: an evaluator has none; enrol it as a trainer, or "
            "take a method whose classifier is shared, such as one with head: text"
        )
    if isinstance(method, ChoosesClients):
        method.admit(client, former, others())
