"""`promptfed bundle`: an installation and a federation where there is no network, in a namespace of their own.

The bundle leaves out torch and CUDA, 5 GB, which the other environment finds where the tests have them: a site with a
torch of its own does the same. The other wheels are packed from what is installed here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

from promptfed.runtime.bundle import installed_versions
from promptfed.runtime.offline_install import LISTED, SUMS
from tests.support.wheelhouse import link, pack
from tests.test_wheel import build, copied

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RUN = """
name: offline
method: { name: promptfl, m: 4 }
rounds: 2
seed: 3
participation: { min_clients: 2 }
training: { epochs: 2, batch_size: 4, learning_rate: 0.02 }
clients:
  - { name: north, data: "symbols:painting?topic=games&per_class=2&test_per_class=1" }
  - { name: south, data: "symbols:cartoon?topic=games&per_class=2&test_per_class=1" }
"""
# Loopback alone, and it is down at first.
UNPLUGGED = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
INTERFACES = "import socket; print([name for _, name in socket.if_nameindex()])"
# Of the size and form of real ones, which nobody can fetch here.
WEIGHTS = """
import sys, open_clip, safetensors.torch
model = open_clip.create_model("ViT-B-32", pretrained=None)
safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, sys.argv[1])
"""
WHO = "release@promptfed"


def run(*command: str | Path, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=900, **more)


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    for tool in ("unshare", "ip", "ssh-keygen"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if run(*UNPLUGGED, "true").returncode != 0:
        pytest.skip("network namespaces need root")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bundle")


@pytest.fixture(scope="module")
def unpacked(folder: Path) -> Path:
    """A bundle that the command has made from a wheelhouse, signed, and unpacked on the other machine."""
    for name in ("source", "wheelhouse"):
        (folder / name).mkdir()
    wheel = build("build_wheel", copied(folder / "source"), folder)
    for name in installed_versions({"torch"}):
        pack(name, folder / "wheelhouse")
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key", check=True)
    run(sys.executable, "-c", WEIGHTS, folder / "weights.safetensors", check=True)
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder / "wheelhouse")}
    made = run(
        sys.executable, "-m", "promptfed", "bundle", "--wheel", wheel, "--without", "torch", "--key", folder / "key",
        "--json",
        "--backbone", "ViT-B-32", "openai", "--backbone-file", folder / "weights.safetensors",
        cwd=folder, env=os.environ | pip,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["signed"] is True
    with tarfile.open(folder / "promptfed-offline.tar") as archive:
        archive.extractall(folder / "there", filter="data")
    shutil.rmtree(folder / "wheelhouse")
    return folder / "there" / "promptfed-offline"


def environment(folder: Path, own: Path) -> Path:
    """A fresh environment that has torch, as a site may have one for its GPUs."""
    venv.create(folder, with_pip=True)
    [packages] = folder.glob("lib/python*/site-packages")
    for old in packages.glob("setuptools*"):  # older than torch wants; a newer one is beside torch
        shutil.rmtree(old)
    (packages / "own_torch.pth").write_text(f"{own}\n")
    return folder


@pytest.fixture(scope="module")
def own_torch(folder: Path) -> Path:
    link(set(installed_versions(set())) - set(installed_versions({"torch"})), folder / "torch")
    return folder / "torch"


def test_it_installs_and_joins_without_network(unpacked: Path, own_torch: Path, folder: Path) -> None:
    assert run(*UNPLUGGED, sys.executable, "-c", INTERFACES).stdout == "['lo']\n"
    site = environment(folder / "site", own_torch)
    installed = run(*UNPLUGGED, sys.executable, unpacked / "install.py", site, cwd=folder)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    assert "No broken requirements found" in installed.stdout
    assert "ViT-B-32 (openai) loads" in " ".join(installed.stdout.split())
    (folder / "run.yaml").write_text(RUN)
    there = run(*UNPLUGGED, site / "bin" / "promptfed", "launch", "run.yaml", "--json", cwd=folder)
    assert there.returncode == 0, there.stderr
    here = run(sys.executable, "-m", "promptfed", "launch", "run.yaml", "--json", cwd=folder)
    assert here.returncode == 0, here.stderr
    assert json.loads(there.stdout)["state_hash"] == json.loads(here.stdout)["state_hash"]
    where = run(site / "bin" / "python", "-c", "import promptfed; print(promptfed.__file__)", cwd=folder)
    assert Path(where.stdout.strip()).is_relative_to(site)


def test_the_list_is_signed(unpacked: Path, folder: Path) -> None:
    algorithm, public = (folder / "key.pub").read_text().split()[:2]
    (folder / "allowed_signers").write_text(f"{WHO} {algorithm} {public}\n")
    command = ["ssh-keygen", "-Y", "verify", "-f", folder / "allowed_signers", "-I", WHO, "-n", "promptfed"]
    text = (unpacked / SUMS).read_text()
    assert run(*command, "-s", unpacked / f"{SUMS}.sig", input=text).returncode == 0
    assert run(*command, "-s", unpacked / f"{SUMS}.sig", input=text.replace("a", "b", 1)).returncode != 0


def test_a_tampered_wheel_is_refused(unpacked: Path, own_torch: Path, folder: Path, tmp_path: Path) -> None:
    """By the installer, and by pip where the list of sums was changed with it."""
    copy = shutil.copytree(unpacked, tmp_path / "copy")
    [wheel] = (copy / "wheels").glob("typer-*.whl")
    before = hashlib.sha256(wheel.read_bytes()).hexdigest()
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    site = environment(tmp_path / "site", own_torch)
    command = [*UNPLUGGED, sys.executable, copy / "install.py", site]
    refused = run(*command)
    assert refused.returncode == 1
    assert refused.stderr == f"wheels/{wheel.name} is not the file that was packed: nothing was installed\n"
    after = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (copy / SUMS).write_text((copy / SUMS).read_text().replace(before, after))
    assert before in (copy / LISTED).read_text()
    refused = run(*command)
    assert refused.returncode == 1
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in refused.stderr
    assert not (site / "bin" / "promptfed").exists()
