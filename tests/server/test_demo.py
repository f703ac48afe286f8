"""`hma-triton demo` as a person runs it: a real server process, every byte compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from hma_triton.cli.main import EXIT_BAD_INPUT, SUBCOMMANDS, run

LIMIT_S = 240


def run_demo(
    *args: str, prefix: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, sys.executable, "-m", "hma_triton.cli.main", "demo", *args],
        env=os.environ | {"COLUMNS": "80"} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def rows(output: str) -> dict[str, list[str]]:
    """Cells of the table's rows, by group."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines()]
    return {row[0]: row[1:] for row in cells if len(row) == 8}


def test_a_hybrid_comes_back_whole() -> None:
    done = run_demo("--memory-gb", "0.4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("google/gemma-3-27b-it, 7 of its 62 layers: a pool of 135.3 MB")
    table = rows(done.stdout)
    # 4096 tokens in blocks of 16: 256 blocks a group, of which a window of 1024 still needs 64.
    per_layer = 256 * 16 * 2 * 16 * 128 * 2 / 1e6
    for group in "012345":
        rule, layers, block, stored, retrieved, everything, saved = table[group]
        assert (rule, layers, block, saved) == ("window 1024", layers, "16", "75%")
        assert stored == everything == f"{per_layer * int(layers):,.1f}"
        assert retrieved == f"{per_layer * int(layers) / 4:,.1f}"
    rule, layers, block, stored, retrieved, everything, saved = table["6"]
    assert (rule, block, saved) == ("full", "16", "0%")
    assert stored == retrieved == everything == f"{per_layer * int(layers):,.1f}"
    assert "lookup of the prompt: 4096 of 4096 tokens" in done.stdout
    assert "lookup of a prompt that shares its first half: 2048 of 4096 tokens" in done.stdout
    assert len(re.findall(r"all [\d,]+ bytes equal, no byte written elsewhere", done.stdout)) == 2
    for direction in ("stored", "retrieved"):
        assert re.search(
            rf"^{direction}: [\d,.]+ MB in \d+ ms, [\d.]+ GB/s; a plain copy .* [\d.]+ GB/s$",
            done.stdout,
            re.MULTILINE,
        )
    assert done.stdout.splitlines()[-1] == "every byte is equal"


@pytest.mark.parametrize(
    ("model", "hit", "rules"),
    [
        # whole chunks of 544 tokens; state only at their ends
        ("qwen3-next-80b", 3808, {"state", "full"}),
        # one latent a token; several geometries in one group
        ("deepseek-v3.2", 4096, {"full"}),
        # a window longer than the prompt
        ("llama-4-scout", 4096, {"window 8192", "full"}),
    ],
)
def test_other_families(model: str, hit: int, rules: set[str]) -> None:
    done = run_demo("--model", model, "--memory-gb", "0.2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"lookup of the prompt: {hit} of 4096 tokens" in done.stdout
    assert {row[0] for group, row in rows(done.stdout).items() if group.isdigit()} == rules


def test_a_planted_fault_is_noticed() -> None:
    done = run_demo("--model", "gpt-oss-20b", "--memory-gb", "0.1", "--plant-fault")
    assert done.returncode == 1
    # a window that keeps less than a chunk
    assert {row[0] for row in rows(done.stdout).values()} >= {"window 128", "full"}
    planted = re.search(r"planted a fault: one bit of (.*)", done.stdout)
    assert planted
    assert f"{planted[1]}: 1 byte(s) differ" in done.stdout
    assert "FAILED: 1 page(s) differ, 0 byte(s) were written elsewhere" in done.stdout
    assert done.stdout.splitlines()[-1] == "NOT every byte is equal"


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--model", "no-such-model"], ["'no-such-model' fits no geometry", "gemma-3-27b-it"]),
        (["--model", "gemma"], ["'gemma' fits", "gemma-3-4b-it", "gemma-4-e4b-it"]),
        (["--chunk-tokens", "100"], ["chunk of 100 tokens", "group 0 (16 tokens", "is 96"]),
        (["--memory-gb", "0.01"], ["0.01 are allowed", "raise --memory-gb"]),
    ],
)
def test_bad_input_is_refused_in_one_line(
    args: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (demo,) = (command for command in SUBCOMMANDS if command.name == "demo")
    with pytest.raises(SystemExit) as ended:
        run(demo, "hma-triton demo", args)
    assert ended.value.code == EXIT_BAD_INPUT
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("hma-triton: ")
    for part in parts:
        assert part in line


def test_shared_memory_that_is_too_small_is_named() -> None:
    """As in a container with its 64 MB; here a /dev/shm of 1 MB that only this process sees."""
    rights = () if os.geteuid() == 0 else ("--map-root-user",)
    shrink = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    prefix = ("unshare", "--mount", *rights, "sh", "-c", shrink, "sh")
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("this sandbox lets no process mount a file system of its own")
    done = run_demo("--model", "gpt-oss-20b", "--memory-gb", "0.1", prefix=prefix)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "do not fit into /dev/shm, which has 1048576 bytes free" in line
    assert "--shm-size" in line
