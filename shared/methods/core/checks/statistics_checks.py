"""The checks of counts over all clients: images of each class (``loss.counts``), and ``calibration``."""

from __future__ import annotations

from promptfed.shared.methods.core.checks.mean_checks import check_one_mean
from promptfed.shared.methods.core.interface.base import Method, MethodError
from promptfed.shared.spec.spec import FederationSpec


def check_counts(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if class counts cannot leave the clients, or if nothing reads them."""
    if spec.loss.counts == "own":
        return
    if spec.loss.balance == "none":
        raise MethodError("balance: none reads no counts: leave counts out, or choose a balance")
    if spec.secure_aggregation is None and not spec.privacy.protects_records:
        raise MethodError(
            "how many images of each class a client has leaves it only in a secure sum or with noise: set "
            "secure_aggregation, or privacy.level: sample; or take counts: own"
        )
    _check(method, spec, "counts: federation")


def check_calibration(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if the federation has no common classifier of one label, or its images are held out already."""
    if spec.calibration is None:
        return
    if spec.task == "multi_label":
        raise MethodError("prediction sets are of images with one label: leave calibration out")
    if method.personal:
        raise MethodError(f"each client of {method.name} has its own classifier, and there is none to calibrate")
    if spec.validates:
        _expect_classes(spec, "calibration")
        return
    if spec.selection is not None or spec.held_out:
        raise MethodError("calibration holds out training images itself: leave selection and held_out out")
    _check(method, spec, "calibration")


def _check(method: Method, spec: FederationSpec, what: str) -> None:
    _expect_classes(spec, what)
    if spec.tuning is not None:
        raise MethodError(f"{what} counts in every trial anew: leave it out until tuning has chosen a method")
    if spec.privacy.protects_clients:
        raise MethodError(f"privacy.level client clips what it adds noise to, and counts are large: leave {what} out")
    if spec.privacy.protects_records and spec.privacy.unit == "group":
        raise MethodError(f"noisy counts protect single images, and privacy.unit is group: leave {what} out")
    if spec.aggregation.server.optimizer != "none":
        raise MethodError(f"{what} adds up, and aggregation.server changes sums: leave one of them out")
    if spec.secure_aggregation is not None and spec.aggregation.weighting != "uniform":
        raise MethodError(f"{what} counts every client alike: set aggregation.weighting: uniform")
    check_one_mean(method, spec.rounds, "count beside", "its state has no place for counts")


def _expect_classes(spec: FederationSpec, what: str) -> None:
    if spec.class_names is None:
        raise MethodError(f"{what} needs class_names, the federation's list of classes")
