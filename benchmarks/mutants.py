"""Do the tests notice? A seeded campaign over small faults that are put into the code: ``make mutants``.

The tests are collected once. A fork runs each test file under coverage and notes which lines each test runs. Then a
fork for each mutant exchanges the code of the mutated function and runs the tests that run its lines, nearest first. No
file of the checkout is changed, so processes that tests start run without the fault; only faults inside of functions
are tried. Called again, it goes on: what is known of the code and the tests as they are is not tried again.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import gc
import hashlib
import json
import os
import re
import signal
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import coverage
import pytest

from benchmarks import harness
from benchmarks.figures import ROOT, tracked

HERE = ROOT / "build" / "mutants"
RESULTS = HERE / "results.jsonl"
EQUIVALENT = (ROOT / "benchmarks" / "equivalent_mutants.txt").read_text().splitlines()
PRODUCT = ("client_service", "coordinator", "shared")
TIERS = {"first": "not slow and not extended", "second": "extended and not slow"}
MOST_TESTS = 400
FIRST_CASES = 12  # so many cases of a parametrised test are tried by nearness, further ones after all other tests
KILLED, SURVIVED, UNTESTED, UNFINISHED, NOT_RUN = "killed", "survived", "no test", "unfinished", "cannot be run"

SWAPPED: Mapping[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,), ast.And: (ast.Or,), ast.Or: (ast.And,), ast.Add: (ast.Sub,), ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,), ast.Div: (ast.Mult,), ast.FloorDiv: (ast.Mult,),
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "sorted": "list", "mean": "sum", "sum": "mean", "any": "all", "all": "any"}
DROPPED = ("abs", "clamp", "clip", "detach", "normalize", "rint", "softmax", "sqrt")
SHOWN_ONLY = re.compile(r"\b(log|logger|logging|warnings)\.", re.IGNORECASE)
LOCK = re.compile(r"lock|turn|exclusive|one_", re.IGNORECASE)
OF_A_PATH = re.compile(r"'|path|folder|place|name|root", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault at one place of a file."""

    path: str
    name: str
    """What is changed and where. No line, so that it stays the same while other code moves."""
    lines: range
    statement: int
    """The first line of the statement that it is in."""
    code: Callable[[], types.CodeType]
    """The module with the fault."""


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of a node."""
    match node:
        case ast.Compare(ops=[op]):
            yield from (ast.Compare(node.left, [other()], node.comparators) for other in SWAPPED[type(op)])
        case ast.BoolOp():
            yield ast.BoolOp(SWAPPED[type(node.op)][0](), node.values)
            yield from node.values if len(node.values) == 2 else ()
        case ast.BinOp() if not (isinstance(node.op, ast.Add | ast.Div) and OF_A_PATH.search(ast.unparse(node))):
            yield from (ast.BinOp(node.left, other(), node.right) for other in SWAPPED.get(type(node.op), ()))
            yield from [node.left] if isinstance(node.op, ast.Mult | ast.Div) else ()
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1 if isinstance(value, int) else value * 2 or 1.0)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.If() | ast.IfExp():
            yield cast(Any, type(node))(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
            if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise | ast.Return | ast.Continue):
                yield ast.If(ast.Constant(False), node.body, node.orelse)
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.AugAssign():
            yield ast.Pass()
        case ast.withitem(optional_vars=None) if LOCK.search(ast.unparse(node)):
            yield ast.withitem(ast.parse("__import__('contextlib').nullcontext()", mode="eval").body)
        case ast.Name(id=name) if name in NAMES:
            yield ast.Name(NAMES[name], ast.Load())
        case ast.Attribute(value=of, attr=name) if name in NAMES:
            yield ast.Attribute(of, NAMES[name], ast.Load())
        case ast.Call(func=ast.Attribute(value=of, attr=name)) if name in DROPPED:
            yield node.args[0] if ast.unparse(of) in ("np", "torch", "F", "math") else of


def places(parent: ast.AST, scope: str = "", inside: bool = False, statement: int = 0) -> Iterator[tuple[Any, ...]]:
    """Every node inside of a function: its function, its statement's first line, and what puts another there."""
    function = isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef)
    if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        scope = f"{scope}.{parent.name}".lstrip(".")
    for field, value in ast.iter_fields(parent):
        if field in ("annotation", "returns", "exc", "decorator_list") or (field == "args" and function):
            continue
        for index, node in enumerate(value) if isinstance(value, list) else [(0, value)]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.JoinedStr | ast.Assert):
                continue
            if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: it asserts that both are as long
                continue
            if isinstance(node, ast.Expr) and SHOWN_ONLY.search(ast.unparse(node)):
                continue
            begins = node.lineno if isinstance(node, ast.stmt) else statement

            def put(new: ast.AST, field: str = field, index: int = index, value: Any = value) -> None:
                setattr(parent, field, [*value[:index], new, *value[index + 1 :]] if isinstance(value, list) else new)

            if inside or function:
                yield node, scope, begins, put
            yield from places(node, scope, inside or function, begins)


def mutants_of(path: str) -> Iterator[Mutant]:
    """All faults of a file that the campaign knows."""
    tree, met = ast.parse((ROOT / path).read_text()), Counter[str]()
    for node, function, statement, put in places(tree):
        for new in replacements(node):
            place: Any = node.context_expr if isinstance(node, ast.withitem) else getattr(node, "test", node)
            old, other = (ast.unparse(part).split("\n")[0][:120] for part in (node, new))
            name = f"{path} {function}: {old} => {other}"
            met[name] += 1

            def code(node: ast.AST = node, new: ast.AST = new, put: Callable[[ast.AST], None] = put) -> types.CodeType:
                put(ast.fix_missing_locations(ast.copy_location(new, getattr(node, "context_expr", node))))
                compiled = compile(tree, os.path.realpath(ROOT / path), "exec", dont_inherit=True)
                put(node)
                return compiled

            lines = range(place.lineno, place.end_lineno + 1)
            yield Mutant(path, name + (f" #{met[name]}" if met[name] > 1 else ""), lines, statement, code)


def drawn(seed: int, folders: Sequence[str], count: int) -> list[Mutant]:
    """``count`` mutants, at most one a line. A change elsewhere in the code leaves the others drawn."""
    paths = [path for path in tracked(*folders) if path.suffix == ".py" and "migrations" not in path.parts]
    found = [mutant for path in paths for mutant in mutants_of(str(path.relative_to(ROOT)))]
    found.sort(key=lambda mutant: hashlib.sha256(f"{seed} {mutant.name}".encode()).digest())
    by_line = {(mutant.path, mutant.lines[0]): mutant for mutant in reversed(found)}
    return [mutant for mutant in found if by_line[mutant.path, mutant.lines[0]] is mutant][:count]


def digest(*names: str) -> str:
    """What some files hold."""
    return hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in names)).hexdigest()[:16]


def forked(work: Callable[[], int], limit: float, log: Path) -> int | None:
    """The exit code of a fork that does the work; None where its time ran out. All that it started is ended."""
    log.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setsid()
            for standard in (1, 2):
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), standard)
            code = work()
        finally:
            os._exit(code)
    end, done, status = time.monotonic() + limit, 0, 0
    while not done and time.monotonic() < end:
        time.sleep(0.02)
        done, status = os.waitpid(pid, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status) if done else os.waitpid(pid, 0) and None


class Runner:
    """Runs tests; notes which fail and how long each takes."""

    def __init__(self) -> None:
        self.failed, self.seconds = list[str](), dict[str, float]()

    def run(self, items: Sequence[pytest.Item], before: Callable[[str], object], to_the_end: bool) -> None:
        """Run them in turn, after ``before`` got the test's name; all, or none after one that fails."""
        for item, following in zip(items, [*items[1:], None], strict=True):
            before(item.nodeid)
            began, plugins = time.monotonic(), item.config.pluginmanager
            plugins.register(self)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            plugins.unregister(self)
            self.seconds[item.nodeid] = round(time.monotonic() - began, 3)
            if self.failed and not to_the_end:
                return

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest."""
        if report.failed:
            self.failed.append(report.nodeid)


def codes(code: types.CodeType) -> Iterator[tuple[tuple[str, int], types.CodeType]]:
    """A module's code and all inside of it, by qualified name and first line."""
    yield (code.co_qualname, code.co_firstlineno), code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from codes(inner)


class Campaign:
    """A plugin of pytest that runs forks in the place of the tests."""

    def __init__(self, options: Any) -> None:
        self.options, self.mapped = options, dict[str, dict[str, Any]]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Map the tests, then run the mutants."""
        self.by_id = {item.nodeid: item for item in session.items}
        self.items = defaultdict[str, list[pytest.Item]](list)
        for name, item in self.by_id.items():
            self.items[name.partition("::")[0]].append(item)
        self.functions = defaultdict[tuple[str, str, int], list[types.FunctionType]](list)
        gc.unfreeze()
        for some in [some for some in gc.get_objects() if type(some) is types.FunctionType]:
            if (code := some.__code__).co_filename.startswith(str(ROOT)):
                self.functions[os.path.realpath(code.co_filename), code.co_qualname, code.co_firstlineno].append(some)
        gc.freeze()
        for number, file in enumerate(self.items, 1):
            self._map(file, f"{number}/{len(self.items)}")
        tests, options = digest(*sorted(self.items)), self.options
        mutants = drawn(options.seed, options.folders, options.count)
        for mutant in mutants:
            rows = kept(mutant)
            tried = rows.get(options.tier, {}).get("tests") == tests
            if not tried and KILLED not in [row["verdict"] for row in rows.values()]:
                self._try(mutant, tests)
        report(mutants)
        return True

    def _map(self, file: str, where: str) -> None:
        """Which lines each test of a file runs, and for how long: known until they or the file change."""
        place = HERE / "map" / f"{self.options.tier}-{file.replace('/', '-')}.json"
        for fresh in (False, True):
            if fresh:
                print(f"{where} {file}: noting what its tests run", flush=True)
                forked(lambda: self._trace(file, place), 600, HERE / "log")
            noted = json.loads(place.read_text()) if place.exists() else {"of": {file: ""}}
            if all((ROOT / name).exists() and digest(name) == was for name, was in noted["of"].items()):
                self.mapped[file] = noted
                return

    def _trace(self, file: str, place: Path) -> int:
        traced = coverage.Coverage(data_file=None, include=[f"{ROOT}/{name}/*" for name in PRODUCT], config_file=False)
        runner, lines = Runner(), defaultdict[str, dict[int, list[str]]](dict)
        traced.start()
        runner.run(self.items[file], traced.switch_context, True)
        traced.stop()
        for measured in traced.get_data().measured_files():
            name = os.path.relpath(os.path.realpath(measured), ROOT)
            for line, tests in traced.get_data().contexts_by_lineno(measured).items():
                lines[name].setdefault(line, []).extend(test for test in tests if test not in ("", *runner.failed))
        of = {name: digest(name) for name in (file, *lines)}
        place.write_text(json.dumps({"of": of, "seconds": runner.seconds, "lines": lines}))
        return 0

    def _nearest(self, mutant: Mutant) -> list[pytest.Item]:
        """The tests that run the mutant's lines; those first that run little but its file, and are quick."""
        near, seconds, chosen = {}, {}, defaultdict[str, list[pytest.Item]](list)
        for mapped in self.mapped.values():
            lines = mapped["lines"].get(mutant.path, {})
            tests = {test for line in mutant.lines for test in lines.get(str(line), ())}
            tests = tests or set(lines.get(str(mutant.statement), ()))
            # Perhaps in a fixture of the whole file, which the first test starts.
            if tests == {next(iter(mapped["seconds"]))}:
                tests = set(mapped["seconds"])
            here = Counter(test for found in lines.values() for test in found)
            everywhere = Counter(test for by in mapped["lines"].values() for found in by.values() for test in found)
            for test in tests & self.by_id.keys():
                seconds[test] = mapped["seconds"][test]
                near[test] = here[test] / (everywhere[test] + 50) / (0.1 + seconds[test]) ** 0.3
        left, functions, rank = self.options.limit / 2, Counter[str](), {}
        for test in sorted(near, key=lambda test: -near[test]):
            rank[test] = functions[test.partition("[")[0]] // FIRST_CASES
            functions.update([test.partition("[")[0]])
        for test in sorted(rank, key=lambda test: rank[test])[:MOST_TESTS]:
            if seconds[test] <= left or not chosen:
                chosen[test.partition("::")[0]].append(self.by_id[test])
                left -= seconds[test]
        return [item for items in chosen.values() for item in items]

    def _try(self, mutant: Mutant, tests: str) -> None:
        began, items, verdict, by = time.monotonic(), self._nearest(mutant), UNTESTED, ""
        if items:
            code = forked(lambda: self._run(mutant, items), self.options.limit, HERE / "log")
            verdict = {0: SURVIVED, 99: NOT_RUN, None: UNFINISHED}.get(code, KILLED)
            log = (HERE / "log").read_text(errors="replace").splitlines()
            by = next((line for line in reversed(log) if line.startswith("FAILED ")), f"ended with {code}")
        row = {"mutant": mutant.name, "source": digest(mutant.path), "tests": tests, "tier": self.options.tier}
        with RESULTS.open("a") as out:
            out.write(json.dumps(row | {"verdict": verdict, "by": by}) + "\n")
        print(f"{verdict} in {time.monotonic() - began:.1f} s: line {mutant.lines[0]} of {mutant.name}", flush=True)

    def _run(self, mutant: Mutant, items: list[pytest.Item]) -> int:
        path, runner, exchanged = os.path.realpath(ROOT / mutant.path), Runner(), 0
        old = dict(codes(compile((ROOT / mutant.path).read_text(), path, "exec", dont_inherit=True)))
        for key, code in codes(mutant.code()):
            for function in self.functions.get((path, *key), ()) if code != old.get(key) else ():
                function.__code__ = code
                exchanged += 1
        if not exchanged:
            return 99
        runner.run(items, lambda test: None, False)
        print("\nFAILED", *runner.failed, flush=True)
        return bool(runner.failed)


def kept(mutant: Mutant) -> dict[str, dict[str, Any]]:
    """The latest row of each tier for a mutant of the file as it is now."""
    rows, now = map(json.loads, RESULTS.read_text().splitlines()), digest(mutant.path)
    return {row["tier"]: row for row in rows if row["mutant"] == mutant.name and row["source"] == now}


def report(mutants: Sequence[Mutant]) -> None:
    """The share of each folder, and all that was not killed."""
    counts, left = defaultdict[str, Counter[str]](Counter), []
    for mutant in mutants:
        tried = {tier: row["verdict"] for tier, row in kept(mutant).items()}
        verdict = "equivalent" if mutant.name in EQUIVALENT else tried.get("first", "not tried")
        if verdict != KILLED and tried.get("second") == KILLED:
            verdict = "second tier"
        if verdict not in (KILLED, "equivalent", NOT_RUN):
            left.append(f"{verdict}: line {mutant.lines[0]} of {mutant.name}")
        for folder in (str(Path(mutant.path).parent), "together"):
            counts[folder][verdict] += 1
    columns = ("equivalent", NOT_RUN, UNFINISHED, KILLED, "second tier", SURVIVED, UNTESTED)
    rows = []
    for folder, count in sorted(counts.items(), key=lambda row: (row[0] == "together", row[0])):
        decided = max(1, sum(count[name] for name in columns[3:]))
        shares = [f"{100 * some / decided:.0f} %" for some in (count[KILLED], count[KILLED] + count["second tier"])]
        rows.append([folder, str(count.total()), *(str(count[name]) for name in columns), *shares])
    print("\n" + harness.table(("folder", "mutants", *columns, "first tier", "both"), rows), *sorted(left), sep="\n")


def main() -> None:
    """Run the campaign."""
    command = harness.parser(__doc__)
    command.add_argument("folders", nargs="*", default=list(PRODUCT), help="where the faults are: shared/privacy")
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--count", type=int, default=300, help="how many mutants")
    command.add_argument("--limit", type=float, default=60, help="seconds for one mutant")
    command.add_argument("--tier", choices=list(TIERS), default="first", help="second: what the first has left alive")
    command.add_argument("--tests", nargs="+", default=["tests"], help="run no others than these files and folders")
    options = command.parse_args()
    (HERE / "map").mkdir(parents=True, exist_ok=True)
    RESULTS.touch()
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = [
        "-q",
        "-s",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        f"--timeout={options.limit / 2}",
        f"--basetemp={HERE / 'tmp'}",
    ]
    raise SystemExit(pytest.main([*chosen, "-m", TIERS[options.tier], *options.tests], plugins=[Campaign(options)]))


if __name__ == "__main__":
    main()
