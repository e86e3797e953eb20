"""Attaching, errors, death of a rank, fork: what a training job meets around the operators."""
import pickle

import on_ranks
import pytest

import mkernel
from mkernel import ErrorCode


def test_a_rank_knows_its_place_and_says_it(cluster):
    for rank, (seen, place, text, explained) in enumerate(cluster.run(on_ranks.rank_and_place)):
        assert seen == rank
        assert place == mkernel.Place.of_rank(rank, nodes=2, local_size=2)
        assert text == f"<mkernel.Group 'default': rank {rank} of 4, 2 nodes, loopback>"
        assert f"node {rank // 2} of 2, local rank {rank % 2} of 2" in explained


def test_a_second_init_under_the_same_name_is_refused(cluster):
    for error in cluster.run(on_ranks.second_init):
        assert error.code == ErrorCode.ALREADY_EXISTS and "shutdown" in error.sentence


def test_errors_carry_code_rank_and_a_sentence_that_says_what_to_do(cluster, tmp_path):
    answers = cluster.run(on_ranks.errors_of, str(tmp_path / "nobody.sock"))
    for rank, caught in enumerate(answers):
        for name, code, telling in [
            ("no group", ErrorCode.INVALID_ARGUMENT, "mkernel.init()"),
            ("no daemon", ErrorCode.UNAVAILABLE, "nobody.sock"),
            ("type", ErrorCode.INVALID_ARGUMENT, "float32"),
            ("inner", ErrorCode.INVALID_ARGUMENT, "4 x 8"),
            ("dimensions", ErrorCode.INVALID_ARGUMENT, "1 dimensions"),
            ("rows", ErrorCode.INVALID_ARGUMENT, "m = 3"),
            ("out", ErrorCode.INVALID_ARGUMENT, "(4, 5)"),
            ("list", ErrorCode.INVALID_ARGUMENT, "DLPack"),
            ("name", ErrorCode.INVALID_ARGUMENT, "'tp' (there are: default)"),
            ("closed", ErrorCode.UNAVAILABLE, "closed"),
        ]:
            assert caught[name] is not None, f"no error for '{name}'"
            assert caught[name].code == code, f"{name}: {caught[name]}"
            assert telling in caught[name].sentence, f"{name}: {caught[name]}"
        assert caught["no daemon"].rank == rank
        assert caught["inner"].rank == rank and str(caught["inner"]).startswith(f"rank {rank}: ")


def test_one_process_may_be_in_several_groups(cluster):
    for rank, answer in enumerate(cluster.run(on_ranks.groups_side_by_side)):
        rail = 4.0 if rank % 2 == 0 else 6.0
        assert answer == (rank // 2, 2, [10.0, rail, rail, 10.0], True, False)


def test_groups_without_this_rank_or_in_disorder_are_refused(cluster):
    answers = cluster.run(on_ranks.wrong_groups_of_the_second_node)
    assert answers[2:] == [[ErrorCode.INVALID_ARGUMENT] * 3] * 2


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(mkernel.Error(14, "rank 3 is gone", 1)))
    assert (error.code, error.sentence, error.rank) == (ErrorCode.PEER_LOST, "rank 3 is gone", 1)
    assert str(error) == "rank 1: rank 3 is gone [peer-lost]"


def test_codes_are_those_of_the_library():
    from mkernel import _c

    library = _c.library()
    library.mk_status_name.restype = _c.c_char_p
    for code in ErrorCode:
        assert library.mk_status_name(int(code)).decode() == code.label


def test_ranks_that_disagree_about_a_shape_are_named(cluster):
    for error in cluster.run(on_ranks.ranks_disagree):
        assert error.code == ErrorCode.SHAPE_MISMATCH and "rank 1" in error.sentence


def test_a_rank_that_never_comes_is_named_when_time_is_up(cluster):
    answers = cluster.run(on_ranks.rank_is_missing, 2)
    errors = [answers[rank] for rank in (0, 1, 3)]
    # The first whose time is up says who is missing; its leaving may be what the others hear of.
    assert any(error.code == ErrorCode.TIMEOUT and "2" in error.sentence for error in errors)
    assert {error.code for error in errors} <= {ErrorCode.TIMEOUT, ErrorCode.ABORTED, ErrorCode.PEER_LOST}


def test_a_rank_that_dies_in_mid_step_is_named_and_the_others_start_over(cluster):
    with pytest.raises(mkernel.RankFailed, match="rank 3's process was ended by signal 9") as failed:
        cluster.run(on_ranks.rank_dies_in_a_step, 3, [cluster.socket(node) for node in range(2)])
    assert sorted(failed.value.answers) == [0, 1, 2]
    for rank, (error, again) in failed.value.answers.items():
        assert error.code == ErrorCode.PEER_LOST and "rank 3" in error.sentence
        assert again == (16.0 if rank < 2 else None)


def test_a_terminal_shows_what_takes_long_on_one_rank_alone(cluster):
    first, *others = cluster.run(on_ranks.what_takes_long_is_said)
    lines = [line.rsplit("\r", 1)[-1] for line in first.removesuffix("\n").split("\n")]
    assert len(lines) == 3, first
    for line, telling in zip(lines, ["group 'default' waits for its ranks", "gemm-ar of", "gemm-ar of"]):
        assert telling in line and line.endswith(" s")
    assert others == [""] * 3


def test_a_child_of_fork_has_no_group_and_its_parent_goes_on(cluster):
    for said, answer in cluster.run(on_ranks.child_of_fork):
        assert said.startswith("False ") and "init()" in said
        assert answer == 32.0


def test_the_structs_of_ctypes_are_those_of_the_header(tmp_path):
    """Compiles the header: every field has its place and size."""
    import ctypes
    import pathlib
    import subprocess

    from mkernel import _c

    include = pathlib.Path(__file__).resolve().parents[2] / "client/include"
    structs = {
        "mk_attach_options": _c.AttachOptions,
        "mk_place": _c.Place,
        "mk_tuning": _c.Tuning,
        "mk_launch_stats": _c.LaunchStats,
        "mk_gemm_shape": _c.GemmShape,
        "mk_gemm_arguments": _c.GemmArguments,
        "mk_moe_shape": _c.MoeShape,
        "mk_moe_arguments": _c.MoeArguments,
        "mk_moe_row": _c.MoeRow,
        "mk_combine_shape": _c.CombineShape,
        "mk_combine_arguments": _c.CombineArguments,
        "mk_ring_shape": _c.RingShape,
        "mk_ring_arguments": _c.RingArguments,
        "mk_collective_shape": _c.CollectiveShape,
        "mk_collective_arguments": _c.CollectiveArguments,
    }
    types = {name: thing for name, thing in vars(_c).items() if isinstance(thing, type) and not name.startswith("_")}
    declared = {thing for thing in types.values() if issubclass(thing, ctypes.Structure) and thing is not ctypes.Structure}
    assert declared == set(structs.values()), "a struct is not compared"
    lines, expected = [], []
    for name, struct in structs.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        for field, _ in struct._fields_:
            lines.append(f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name}*)0)->{field}));')
            place = getattr(struct, field)
            expected.append(f"{name}.{field} {place.offset} {place.size}")
    for name in ("BF16", "F16", "KN", "NK", "CPU", "CUDA", "FUSED", "UNFUSED", "AUTO", "ROWS", "EXPERT_OFFSETS", "FIRST_EXPERT", "PARTIALS_ELEMENT",
                 "PARTIALS_F32"):
        lines.append(f'printf("{name} %d\\n", MK_{name});')
        expected.append(f"{name} {getattr(_c, name)}")
    source = tmp_path / "structs.c"
    source.write_text(
        '#include <stdio.h>\n#include "mkernel/mkernel_c.h"\nint main(void) {\n' + "\n".join(lines) + "\nreturn 0;\n}\n"
    )
    subprocess.run(["cc", "-I", include, source, "-o", tmp_path / "structs"], check=True)
    assert subprocess.run([tmp_path / "structs"], capture_output=True, text=True, check=True).stdout.splitlines() == expected
