"""Defects, each a change of one place under which a test must fail: what holds privacy up is looked at by something."""

from __future__ import annotations

from dataclasses import dataclass

TRAINING = "shared/methods/core/training.py"
MECHANISM = "tests/shared/methods/test_private_training.py"
LOOP = "client_service/task_loop.py"
TASKS = "tests/client_service/test_policy.py"
PROTECTION = "tests/client_service/test_agreement.py"


@dataclass(frozen=True)
class Mutant:
    """``old`` of a file becomes ``new``, and then ``test`` (a file, and what its tests' names hold) must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str
    named: str


MUTANTS = (
    Mutant(
        "no noise",
        TRAINING,
        "self._leave((total + sent_to(noise, self._device)) / (q * given.units))",
        "self._leave((total + 0 * sent_to(noise, self._device)) / (q * given.units))",
        MECHANISM,
        "written_out or noise_of_the_said_size",
    ),
    Mutant(
        "divided by the sample's own size",
        TRAINING,
        "/ (q * given.units))",
        "/ max(1, len(chosen)))",
        MECHANISM,
        "written_out or noise_of_the_said_size",
    ),
    Mutant(
        "no clip",
        TRAINING,
        "    return finite * (clip * WITHIN / norms.clamp(min=clip * WITHIN)).unsqueeze(1)",
        "    return finite + 0 * norms.unsqueeze(1)",
        MECHANISM,
        "written_out or clipped",
    ),
    Mutant(
        "an empty sample is skipped",
        TRAINING,
        "        total = self._summed(chosen)\n",
        "        if not len(chosen):\n            return\n        total = self._summed(chosen)\n",
        MECHANISM,
        "empty_sample",
    ),
    Mutant(
        "every unit in every step",
        "shared/privacy/noise.py",
        "np.flatnonzero(self.uniforms(count) <= q)",
        "np.flatnonzero(self.uniforms(count) <= 1)",
        MECHANISM,
        "written_out",
    ),
    Mutant(
        "private tensors outside the norm",
        "shared/methods/fedpgp.py",
        "final = pf.train(context, [shared, *adaptation.values()], loss, objective=pf.Objective(units, common))",
        "final = pf.train(context, [shared], loss, objective=pf.Objective(\n"
        "            lambda copies, rows: units([*copies, *(one.expand(len(rows), *one.shape) for one in "
        "adaptation.values())], rows)))",
        MECHANISM,
        "full_batch_is_the_plain_one and fedpgp",
    ),
    Mutant(
        "the loss is sent",
        "client_service/training/trainer.py",
        'measured = {"steps": protection.event.count, "trained_parameters": sum(trained)}',
        'measured = {"steps": protection.event.count, "loss": 1.0}\n'
        '            self.agreement.consent.terms.metrics.append("loss")',
        PROTECTION,
        "nothing_that_depends_on_records",
    ),
    Mutant(
        "sent before it is paid",
        LOOP,
        "        if not await self._may_leave(pending):\n            return\n",
        "",
        PROTECTION,
        "paid_before_it_is_sent",
    ),
    Mutant(
        "a redirect is followed wherever it leads",
        "client_service/http/connection.py",
        "follow_redirects=False",
        "follow_redirects=True",
        "tests/client_service/test_resending.py",
        "redirect_is_followed_to_nobody",
    ),
    Mutant(
        "tasks are not held against the policy",
        LOOP,
        "self.work.expect_policy(task)",
        "self.work.expect_policy()",
        TASKS,
        "task_that_offends and epochs",
    ),
    Mutant(
        "an expired policy lets a waiting update go",
        LOOP,
        "        protection = self.work.protection\n        try:\n            self.work.expect_policy()\n",
        "        protection = self.work.protection\n        try:\n",
        TASKS,
        "expired_holds_back",
    ),
    Mutant(
        "an old ledger is not looked for",
        "client_service/task_loop.py",
        "        await self.compute.run(lambda: protection.ledger.expect_whole(told))",
        "        await self.compute.run(lambda: protection.ledger.lacks(told))",
        "tests/client_service/test_ledger.py",
        "sends_nothing_more",
    ),
)
