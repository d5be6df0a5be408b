"""The launcher: local ranks give what one process gives, and no process outlives a launch."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import alpa_lite as al
from alpa_lite.cli import main
from alpa_lite.errors import ExportError, LaunchError
from alpa_lite.executor import launch as launcher
from alpa_lite.executor.global_arguments import given_values
from alpa_lite.executor.launch import LaunchRequest, launch
from alpa_lite.executor.load_export import load_part
from tests.executor.exported_steps import batch, plan, shapes, state, step
from tests.marks import slow_but

pytest.importorskip("flatbuffers", reason="flatbuffers is not installed: pip install 'alpa-lite[export]'")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    out = tmp_path_factory.mktemp("launch") / "out"
    plan(2).export(step, out, state(), shapes(batch()))
    np.savez(out.parent / "inputs.npz", **{f"1/{name}": value for name, value in batch().items()})
    return out


def processes(folder: Path) -> list[str]:
    """Command lines of all live processes that name the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(folder) in line and "launch" in line:
            found.append(line)
    return found


def none_left(folder: Path) -> bool:
    deadline = time.monotonic() + 20
    while processes(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.medium
def test_nobody_takes_the_coordinators_port_before_rank_0_listens(exported, monkeypatch):
    begin, refused = launcher._start, []

    def start(request, rank, count, address, logs):
        with socket.socket() as other:
            try:
                other.bind(("127.0.0.1", int(address.rpartition(":")[2])))
            except OSError as error:
                refused.append(error.errno)
        return begin(request, rank, count, address, logs)

    monkeypatch.setattr(launcher, "_start", start)
    assert launch(LaunchRequest(folder=str(exported), timeout_s=200)).startswith("step 1: ")
    assert refused == [errno.EADDRINUSE] * 2


def listening(port: int) -> set[str]:
    """Addresses at which somebody listens at this port, as Linux writes them."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {
        at.partition(":")[0]
        for at, state in ((row[1], row[3]) for row in rows)
        if state == "0A" and f":{port:04X}" in at
    }


@pytest.mark.medium
@pytest.mark.skipif(sys.platform != "linux", reason="reads who listens from /proc/net")
def test_the_coordinator_listens_at_loopback_alone(exported, monkeypatch):
    begin, seen = launcher._wait, set()

    def wait(ranks, request, logs):
        while not (now := listening(ports[0])) and ranks[0].poll() is None:
            time.sleep(0.01)
        seen.update(now)
        begin(ranks, request, logs)

    ports, keep = [], launcher.kept_port

    def kept(host):
        found = keep(host)
        ports.append(found.getsockname()[1])
        return found

    monkeypatch.setattr(launcher, "_wait", wait)
    monkeypatch.setattr(launcher, "kept_port", kept)
    assert launch(LaunchRequest(folder=str(exported), timeout_s=200)).startswith("step 1: ")
    assert seen and all(address.endswith("0100007F") for address in seen)


@pytest.mark.medium
@pytest.mark.parametrize("single", slow_but({True}, [False, True]))
def test_two_steps_on_two_ranks_and_in_one_process(exported, tmp_path, single):
    """State goes round, the batch stays; the values are those of the plain function."""
    out = tmp_path / "results.npz"
    request = LaunchRequest(
        folder=str(exported),
        num_steps=2,
        inputs=str(exported.parent / "inputs.npz"),
        out=str(out),
        single_process=single,
        timeout_s=120,
    )
    text = launch(request, num_ranks=2)
    run, now = jax.jit(step), state()
    for number in range(2):
        now, loss = run(now, batch())
        line = text.splitlines()[number]
        assert line.startswith(f"step {number + 1}: out/1 = ")
        assert float(line.rpartition(" ")[2]) == pytest.approx(float(loss), rel=1e-5)
    assert "out/0/params/w1: bfloat16[16,32], norm " in text
    results = np.load(out)
    assert sorted(results) == ["out/0/key", "out/0/params/w1", "out/0/params/w2", "out/1"]
    np.testing.assert_allclose(results["out/0/params/w2"], now["params"]["w2"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(results["out/0/key"], jax.random.key_data(now["key"]))
    assert none_left(exported)


def test_the_launching_process_needs_no_jax():
    code = "import sys, alpa_lite.executor.launch; assert not {'jax', 'ortools'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.medium
def test_the_command_line_runs_seeded_values(exported):
    result = CliRunner().invoke(main, ["launch", str(exported), "--seed", "3", "--single-process"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("step 1: out/1 = ")
    other = CliRunner().invoke(main, ["launch", str(exported), "--seed", "4", "--single-process"])
    assert other.stdout != result.stdout


@pytest.mark.medium
def test_a_step_of_64_bits(tmp_path):
    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((4, 4), "float64")
        made = al.plan(lambda x: x / 3, x, cluster=al.Cluster.parse("1x2:cpu"))
        made.export(lambda x: x / 3, tmp_path / "out", x)
    value = np.arange(16.0).reshape(4, 4)
    np.savez(tmp_path / "inputs.npz", **{"0": value})
    files = {"inputs": str(tmp_path / "inputs.npz"), "out": str(tmp_path / "results")}
    text = launch(LaunchRequest(folder=str(tmp_path / "out"), single_process=True, **files))
    assert text == f"step 1: no scalar results\nout: float64[4,4], norm {np.linalg.norm(value / 3):.6g}\n"
    np.testing.assert_allclose(np.load(tmp_path / "results")["out"], value / 3, rtol=1e-15)


@pytest.mark.medium
def test_one_rank_that_fails_ends_all(exported, tmp_path):
    broken = shutil.copytree(exported, tmp_path / "broken")
    path = broken / "rank_1" / "1.npy"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1] + b"x")
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=r"(?s)rank 1 of 2 ended with code 1; .*damaged: 'rank_1/1.npy' was changed"):
        launch(LaunchRequest(folder=str(broken), timeout_s=200))
    assert time.monotonic() - begin < 100 and none_left(broken)


@pytest.mark.medium
def test_ranks_that_take_too_long_are_stopped(exported):
    with pytest.raises(LaunchError, match=r"(?s)ranks \[0.*of 2 had not ended after 0\.1 s.*Raise it \(--timeout\)"):
        launch(LaunchRequest(folder=str(exported), timeout_s=0.1))
    assert none_left(exported)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked up in /proc")
@pytest.mark.medium
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_their_launcher(exported, kind):
    command = [sys.executable, "-m", "alpa_lite", "launch", str(exported), "--steps", "1000000"]
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # jobs in the background ignore it, and so would the child
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    signal.signal(signal.SIGINT, before)
    try:
        deadline = time.monotonic() + 60
        while len(processes(exported)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(processes(exported)) == 3
        os.kill(process.pid, kind)
        process.communicate(timeout=60)
        assert process.returncode != 0 and none_left(exported)
    finally:
        with suppress(ProcessLookupError):  # where this fails, the next test does not find them
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "3"], "3 ranks were asked of the export"),
        (["--ranks", "0"], "Leave the number out."),
        (["--steps", "0"], "num_steps=0"),
        (["--timeout", "0"], "timeout_s=0 were given"),
        (["--out", "no/where.npz"], "cannot be written to 'no/where.npz'"),
        (["--inputs", "gone.npz"], "there is no file 'gone.npz'"),
    ],
)
def test_bad_input_is_told_before_anything_starts(exported, arguments, message):
    result = CliRunner().invoke(main, ["launch", str(exported), *arguments])
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and message in result.stderr
    assert "Traceback" not in result.output


def test_a_folder_without_an_export(tmp_path):
    result = CliRunner().invoke(main, ["launch", str(tmp_path)])
    assert result.exit_code == 2 and "holds no export" in result.stderr


def test_a_step_without_a_cpu_form_is_not_started(exported, tmp_path):
    copy = shutil.copytree(exported, tmp_path / "copy")
    manifest = copy / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"platforms": ["cpu"]', '"platforms": ["cuda"]'))
    with pytest.raises(ExportError, match=r"lowered for cuda alone.*Use al\.load_export on the devices"):
        launch(LaunchRequest(folder=str(copy)))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no archive", "cannot be read"),
        ({"1/z": np.zeros(3)}, r"has '1/z', which is no argument; they are 0/key, "),
        ({"1/x": np.zeros((4, 16))}, r"has '1/x' of shape \(4, 16\), it must be \(8, 16\)"),
        ({"1/x": np.array([object()])}, "cannot be read"),
    ],
)
def test_inputs_that_do_not_fit(exported, tmp_path, content, message):
    path = tmp_path / "inputs.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.savez(path, **content)
    with pytest.raises(LaunchError, match=rf"(?s)inputs.npz' cannot be used: the file {message}.*Correct the file"):
        given_values(load_part(exported, 0), str(path), 0)
