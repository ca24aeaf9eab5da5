from hypothesis import given
from hypothesis import strategies as st

from shardopt.collectives.flags import FLAGS_PER_INT, pack_flags, ranks_by_flag, unpack_flags

flag_lists = st.one_of(
    st.lists(st.booleans(), max_size=5),
    st.lists(st.booleans(), min_size=FLAGS_PER_INT - 1, max_size=2 * FLAGS_PER_INT + 1),
)


def test_the_worked_example_of_pack_flags_holds():
    assert pack_flags([True, False, True]) == [5]


@given(flag_lists)
def test_flags_unpacked_are_the_flags_that_were_packed(flags):
    assert unpack_flags(pack_flags(flags), len(flags)) == flags


@given(flag_lists)
def test_packed_flags_fit_into_an_int64(flags):
    assert all(0 <= packed < 2**63 for packed in pack_flags(flags))


def same(member):
    """The rank of a member where there are as many ranks as members."""
    return member


def test_the_worked_example_of_ranks_by_flag_holds():
    assert ranks_by_flag([[True, False], [True, True]], same) == ((0, 1), (1,))


def test_a_flag_of_any_member_counts_once_for_its_rank():
    """Four members, two of each rank."""
    flags = [[True, False, False], [False, False, True], [True, True, False], [False] * 3]
    assert ranks_by_flag(flags, lambda member: member % 2) == ((0,), (0,), (1,))


def test_ranks_stand_in_order_whatever_the_order_of_members():
    flags = [[True], [True], [True]]
    assert ranks_by_flag(flags, lambda member: 2 - member) == ((0, 1, 2),)


@given(
    st.integers(0, 6).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1, max_size=4)
    )
)
def test_a_rank_is_listed_for_a_flag_exactly_where_it_set_it(flags_by_rank):
    listed = ranks_by_flag(flags_by_rank, same)
    assert len(listed) == len(flags_by_rank[0])
    for number, ranks in enumerate(listed):
        assert list(ranks) == [r for r, flags in enumerate(flags_by_rank) if flags[number]]
