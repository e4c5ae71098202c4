"""The recipes of the boards, what they expect, and what speaks against a model on a board."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pilotfish.base.errors import UnsupportedError
from pilotfish.boards.board import ALL_BOARDS, BOARDS, GIB, JETPACKS, Board, board_named
from pilotfish.boards.expectation import UNKNOWN, UNKNOWN_RUNTIME_BYTES, expect
from pilotfish.boards.gpu_forms import knows_opset24, why_not
from pilotfish.boards.misfit import MisfitError, misfits
from pilotfish.boards.recipe import Role, Wishes, recipe
from pilotfish.boards.shape import ModelShape, Parameters
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import BuildError
from pilotfish.engines.manifest import CachedLayer
from pilotfish.engines.tensorrt.gates import check_form
from pilotfish.export.dialects import DIALECTS
from tests.support.tiny import tiny_artifact

SMALL = ModelShape(
    name="small",
    context=4096,
    cached=tuple(CachedLayer(layer=i, kv_heads=2, head_dim=64) for i in range(24)),
    parameters=Parameters(matrices=400_000_000, tables=100_000_000),
    tied=True,
)
SEVEN_B = msgspec.structs.replace(
    SMALL,
    name="seven",
    context=32768,
    cached=tuple(CachedLayer(layer=i, kv_heads=8, head_dim=128) for i in range(32)),
    parameters=Parameters(matrices=7_000_000_000, tables=500_000_000, head=500_000_000),
    tied=False,
)


@pytest.mark.parametrize(
    ("board", "jetpack", "role", "blocks", "form"),
    [
        ("orin-nano", None, "device", (), ("opset17", "fp16", ("tensorrt",))),
        ("orin-nano", "6.2", "device", ("Q4_1",), ("opset17", "fp16", ("tensorrt",))),
        ("orin-nano", "7.2", "device", (), ("tensorrt", "int4", ("tensorrt",))),
        ("orin-nx", "7.2", "device", ("gptq",), ("tensorrt", "stored", ("tensorrt",))),
        ("agx-orin", None, "edge", (), ("opset17", "fp16", ("tensorrt",))),
        ("agx-orin", "7.2", "edge", ("Q4_1",), ("opset24", "fp16", ("tensorrt",))),
        ("thor", None, "device", (), ("tensorrt", "int4", ("tensorrt",))),
        ("thor", None, "edge", (), ("opset24", "fp16", ("tensorrt",))),
        ("rtx", None, "device", (), ("opset24", "fp16", ("tensorrt-rtx", "cuda"))),
        ("rtx", None, "edge", (), ("opset24", "fp16", ("tensorrt-rtx", "cuda"))),
        ("cpu", None, "device", (), ("contrib", "int8", ("cpu",))),
        ("cpu", None, "device", ("Q4_1",), ("contrib", "stored", ("cpu",))),
        ("cpu", None, "edge", ("Q4_1",), ("opset24", "fp32", ("cpu",))),
    ],
)
def test_the_recipe_of_a_board(
    board: str,
    jetpack: str | None,
    role: Role,
    blocks: tuple[str, ...],
    form: tuple[str, str, tuple[str, ...]],
) -> None:
    model = msgspec.structs.replace(SMALL, blocks=blocks)
    chosen = recipe(BOARDS[board], jetpack=jetpack, role=role, model=model)
    assert (chosen.dialect, chosen.precision, chosen.providers) == form
    assert chosen.context is None
    assert all(reason.endswith(".") for reason in chosen.reasons)


def test_a_jetpack_in_whose_form_a_model_fits_is_named() -> None:
    """7 billion weights have 14 GB in fp16, and less than 6 in int4."""
    nano = BOARDS["orin-nano"]
    for jetpack in (None, "6.2"):
        with pytest.raises(
            MisfitError, match=r"or JetPack 7\.2 with --jetpack 7\.2: .* in int4 with"
        ):
            recipe(nano, jetpack=jetpack, model=SEVEN_B)
    assert recipe(nano, jetpack="7.2", model=SEVEN_B).context is not None
    for options in ({"wishes": Wishes(precision="fp16")}, {"role": "edge"}, {"slots": 64}):
        with pytest.raises(MisfitError) as refusal:
            recipe(nano, model=SEVEN_B, **options)
        assert "--jetpack" not in str(refusal.value)


@pytest.mark.parametrize(
    "board", [each for each in ALL_BOARDS.values() if each.gpu], ids=lambda board: board.name
)
def test_every_recipe_uses_the_gpu_on_its_jetpacks(board: Board) -> None:
    for jetpack in (None, *board.jetpacks):
        for role in ("device", "edge"):
            chosen = recipe(board, jetpack=jetpack, role=role, model=SMALL)
            form = SMALL.in_form(chosen.dialect, chosen.precision)
            assert not [m for m in misfits(board, form, jetpack=jetpack) if m.refuses], chosen
            assert chosen.precision in DIALECTS[chosen.dialect].precisions


@pytest.mark.parametrize("version", [*(each.tensorrt for each in JETPACKS.values()), None])
def test_the_forms_are_those_that_our_tensorrt_takes(tmp_path: Path, version: str | None) -> None:
    """`gpu_forms` says for another machine what `engines.tensorrt.gates` says for this one."""
    manifest = tiny_artifact(tmp_path / "tiny", dialect="opset24").manifest
    for name, dialect in DIALECTS.items():
        for precision in dialect.precisions:
            each = msgspec.structs.replace(
                manifest, dialect=name, precision=precision, opset=dialect.opset
            )
            try:
                check_form(each, opset24=knows_opset24(version))
                taken = True
            except BuildError:
                taken = False
            why = why_not("tensorrt", name, precision, states=False, tensorrt=version)
            assert (why is None) == taken, (name, precision, why)


def test_what_the_caller_states_counts_if_the_gpu_runs_it() -> None:
    orin = BOARDS["orin-nano"]
    chosen = recipe(orin, jetpack="7.2", model=SMALL, wishes=Wishes(precision="int8"))
    assert (chosen.dialect, chosen.precision) == ("tensorrt", "int8")
    chosen = recipe(orin, model=SMALL, wishes=Wishes(precision="fp32", context=1024))
    assert (chosen.dialect, chosen.precision, chosen.context) == ("opset17", "fp32", 1024)
    chosen = recipe(BOARDS["rtx"], model=SMALL, wishes=Wishes(precision="int4"))
    assert (chosen.dialect, chosen.providers) == ("tensorrt", ("tensorrt-rtx", "cuda"))


def test_a_form_for_one_jetpack_alone_is_not_refused_but_said() -> None:
    chosen = recipe(BOARDS["orin-nx"], model=SMALL, wishes=Wishes(precision="int4"))
    assert chosen.dialect == "tensorrt"
    assert any("JetPack 6.2" in warning for warning in chosen.warnings)


@pytest.mark.parametrize(
    ("board", "jetpack", "wishes", "words"),
    [
        ("orin-nano", None, Wishes(dialect="contrib"), "does not run the dialect contrib"),
        ("orin-nano", "6.2", Wishes(precision="int4"), "TensorRT 10.3 does not know the dialect"),
        ("thor", None, Wishes(dialect="opset24", precision="int8"), "only in the dialect tensorrt"),
        ("rtx", None, Wishes(dialect="contrib"), "does not run the dialect contrib"),
    ],
)
def test_an_idle_gpu_is_refused_unless_the_cpu_is_accepted(
    board: str, jetpack: str | None, wishes: Wishes, words: str
) -> None:
    with pytest.raises(MisfitError, match=words) as refusal:
        recipe(BOARDS[board], jetpack=jetpack, model=SMALL, wishes=wishes)
    assert "idle" in str(refusal.value)
    assert "--cpu" in str(refusal.value)
    accepted = msgspec.structs.replace(wishes, cpu=True)
    assert recipe(BOARDS[board], model=SMALL, wishes=accepted).providers == ("cpu",)


def test_states_run_only_on_the_cpu() -> None:
    states = msgspec.structs.replace(SMALL, states=True)
    with pytest.raises(MisfitError, match="recurrent states run only on the CPU"):
        recipe(BOARDS["thor"], model=states)
    chosen = recipe(BOARDS["thor"], model=states, wishes=Wishes(cpu=True))
    assert (chosen.dialect, chosen.providers) == ("contrib", ("cpu",))
    assert recipe(BOARDS["cpu"], model=states).dialect == "contrib"


def test_a_vendors_runtime_counts_if_it_is_named() -> None:
    orin, form = BOARDS["orin-nano"], SMALL.in_form("opset24", "int4")
    assert misfits(orin, form, jetpack="6.2")[0].kind == "idle-gpu"
    assert not misfits(orin, form, jetpack="6.2", further=["cuda"])


def test_what_does_not_fit_is_refused_with_sizes_and_advice() -> None:
    with pytest.raises(MisfitError) as refusal:
        recipe(BOARDS["orin-nano"], model=SEVEN_B)
    message = str(refusal.value)
    assert "weights of 14.9 GiB in fp16" in message
    assert "more than the 7.2 GiB there" in message
    assert "a smaller model" in message
    smaller = board_named("agx-orin-32gb")
    with pytest.raises(MisfitError, match=r"choose --context \d+ or less, or fewer slots"):
        recipe(smaller, model=SEVEN_B, slots=4, wishes=Wishes(context=32768))


def test_a_context_that_does_not_fit_is_shortened() -> None:
    board = board_named("orin-nx-8gb")
    chosen = recipe(board, jetpack="7.2", model=SEVEN_B)
    assert chosen.precision == "int4"
    assert chosen.context is not None
    form = SEVEN_B.in_form(chosen.dialect, chosen.precision)
    assert 512 <= chosen.context < SEVEN_B.context
    expected = expect(board, form, context=chosen.context)
    left = (expected.board_bytes or 0) - expected.known_bytes
    assert 0 <= left - UNKNOWN_RUNTIME_BYTES < 64 * expected.kv_bytes // chosen.context
    assert not chosen.warnings
    assert any(f"context {chosen.context}" in reason for reason in chosen.reasons)


def test_a_tight_fit_is_said_and_not_refused() -> None:
    board = board_named("orin-nx-8gb")
    chosen = recipe(board, jetpack="7.2", model=SEVEN_B, wishes=Wishes(context=8192))
    assert chosen.context == 8192
    assert any("memory to CUDA, TensorRT and all other" in each for each in chosen.warnings)


def test_a_smaller_board_of_the_family_is_named() -> None:
    chosen = recipe(BOARDS["agx-orin"], model=SEVEN_B, slots=3)
    assert any("agx-orin-32gb" in warning for warning in chosen.warnings)


def test_a_jetpack_that_the_board_does_not_have_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"does not run JetPack 6.2: choose 7.2"):
        recipe(BOARDS["thor"], jetpack="6.2")
    with pytest.raises(UnsupportedError, match="has no JetPack: leave out --jetpack"):
        recipe(BOARDS["cpu"], jetpack="7.2")


def test_memory_is_weights_and_keys_and_values() -> None:
    form = SMALL.in_form("opset24", "fp16")
    expected = expect(BOARDS["thor"], form, context=2048, slots=3)
    assert SMALL.parameters is not None
    assert expected.weights_bytes == 2 * SMALL.parameters.total
    assert expected.kv_bytes == 3 * 2048 * 24 * 2 * 2 * 64 * 2
    assert expected.board_bytes == 128 * GIB
    twice = expect(BOARDS["thor"], SMALL.in_form("opset17", "fp16"), context=2048, slots=3)
    assert twice.kv_bytes == 2 * expected.kv_bytes
    floats = expect(BOARDS["thor"], SMALL.in_form("tensorrt", "int4"), context=2048, slots=3)
    assert floats.kv_bytes == 2 * expected.kv_bytes


def test_speed_is_bandwidth_by_what_a_pass_reads() -> None:
    form = SMALL.in_form("opset24", "fp16")
    nano = BOARDS["orin-nano"]
    expected = expect(nano, form, context=2048)
    assert SMALL.parameters is not None
    read = 2 * SMALL.parameters.total + 1024 * 24 * 2 * 2 * 64 * 2
    assert expected.tokens_per_s_bound == pytest.approx(102e9 / read)
    assert expected.slower_bound == pytest.approx(68e9 / read)


def test_a_pass_reads_only_the_experts_that_it_uses_and_no_table() -> None:
    sizes = Parameters(matrices=10, experts=800, active_experts=200, tables=50, head=50)
    form = ModelShape(name="m", context=64, parameters=sizes).in_form("opset24", "fp16")
    assert form.weights_bytes == 2 * 910
    assert form.read_bytes == 2 * 260


def test_what_is_not_known_is_said_to_be_unknown(tmp_path: Path) -> None:
    artifact = tiny_artifact(tmp_path / "tiny")
    lines = expect(BOARDS["rtx"], artifact).lines()
    assert lines[0].endswith(f"how much programs have there is {UNKNOWN}")
    assert lines[1].startswith(f"speed: {UNKNOWN}")
    alone = expect(BOARDS["orin-nano"], artifact.manifest)
    assert alone.weights_bytes is None
    assert alone.fits is None
    assert alone.tokens_per_s_bound is None


def test_an_artifact_is_measured_by_its_files(tmp_path: Path) -> None:
    artifact = tiny_artifact(tmp_path / "tiny", precision="fp16", dialect="opset17")
    expected = expect(BOARDS["orin-nano"], Artifact.open(tmp_path / "tiny"))
    assert expected.weights_bytes == (artifact.path / "model.onnx.data").stat().st_size
    assert expected.kv_bytes == 2 * 256 * 2 * 2 * 2 * 16 * 2
    assert not [each for each in misfits(BOARDS["orin-nano"], artifact) if each.refuses]
