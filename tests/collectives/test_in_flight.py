import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardopt.collectives import InFlightQueue, run_in_flight


class Operations:
    """Numbered operations that write down when they are launched and finished, and fail where told to."""

    def __init__(self, count, bad_launches=(), bad_finishes=()):
        self.count = count
        self.bad_launches = bad_launches
        self.bad_finishes = bad_finishes
        self.events = []
        self.in_flight = 0
        self.deepest = 0

    def launches(self):
        return [lambda number=number: self._launch(number) for number in range(self.count)]

    def run(self, depth):
        """Run them all; return the text of what was raised."""
        try:
            run_in_flight(self.launches(), depth=depth)
        except RuntimeError as error:
            return str(error)
        return None

    def finished(self):
        return [number for kind, number in self.events if kind == "finish"]

    def launched(self):
        return [number for kind, number in self.events if kind == "launch"]

    def _launch(self, number):
        if number in self.bad_launches:
            raise RuntimeError(f"launch {number}")
        self.events.append(("launch", number))
        self.in_flight += 1
        self.deepest = max(self.deepest, self.in_flight)
        return lambda: self._finish(number)

    def _finish(self, number):
        self.events.append(("finish", number))
        self.in_flight -= 1
        if number in self.bad_finishes:
            raise RuntimeError(f"finish {number}")


counts = st.integers(0, 9)
depths = st.integers(1, 5)
numbers = st.sets(st.integers(0, 8), max_size=3)


@given(counts, depths)
def test_every_operation_is_launched_and_finished_once_in_order(count, depth):
    operations = Operations(count)
    operations.run(depth)
    assert (operations.launched(), operations.finished()) == ([*range(count)], [*range(count)])


@given(counts, depths, numbers, numbers)
def test_what_was_launched_is_finished_once_in_order_whatever_raises(count, depth, launch, finish):
    operations = Operations(count, launch, finish)
    operations.run(depth)
    assert operations.finished() == operations.launched()


@given(counts, depths, numbers, numbers)
def test_never_more_than_depth_operations_are_unfinished(count, depth, launch, finish):
    operations = Operations(count, launch, finish)
    operations.run(depth)
    assert operations.deepest <= depth


@given(counts, depths)
def test_the_window_is_used_in_full(count, depth):
    operations = Operations(count)
    operations.run(depth)
    assert operations.deepest == min(count, depth)


@given(counts, depths, numbers)
def test_nothing_is_launched_after_a_launch_raised(count, depth, launch):
    operations = Operations(count, bad_launches=launch)
    operations.run(depth)
    assert operations.launched() == [*range(min([count, *launch]))]


@given(counts, depths, numbers)
def test_of_several_failing_finishes_the_first_is_raised(count, depth, finish):
    operations = Operations(count, bad_finishes=finish)
    failing = sorted(number for number in finish if number < count)
    assert operations.run(depth) == (f"finish {failing[0]}" if failing else None)


def test_a_failing_launch_is_raised_and_not_the_finishes_that_fail_after_it():
    assert Operations(3, bad_launches={2}, bad_finishes={0, 1}).run(depth=2) == "finish 0"
    assert Operations(3, bad_launches={1}, bad_finishes={0}).run(depth=2) == "launch 1"


def test_operations_in_flight_are_finished_when_the_launches_themselves_raise():
    operations = Operations(2)

    def launches():
        yield from operations.launches()
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        run_in_flight(launches(), depth=3)
    assert operations.finished() == [0, 1]


def test_launches_are_drawn_one_at_a_time():
    operations = Operations(3)
    drawn = []

    def launches():
        for number, launch in enumerate(operations.launches()):
            drawn.append((number, len(operations.finished())))
            yield launch

    run_in_flight(launches(), depth=1)
    assert drawn == [(0, 0), (1, 0), (2, 1)]


# --- InFlightQueue ---------------------------------------------------------------------------------------


def launch_all(queue, operations):
    for launch in operations.launches():
        queue.launch(launch)


def test_a_window_keeps_its_depth_of_operations_in_flight():
    operations, queue = Operations(5), InFlightQueue(depth=2)
    launch_all(queue, operations)
    assert operations.finished() == [0, 1, 2]


def test_draining_finishes_the_rest_in_order():
    operations, queue = Operations(5), InFlightQueue(depth=3)
    launch_all(queue, operations)
    queue.drain()
    assert operations.finished() == [0, 1, 2, 3, 4]


def test_draining_twice_finishes_once():
    operations, queue = Operations(2), InFlightQueue(depth=3)
    launch_all(queue, operations)
    queue.drain()
    queue.drain()
    assert operations.finished() == [0, 1]


def test_draining_an_empty_window_does_nothing():
    InFlightQueue(depth=1).drain()


def test_a_failing_launch_finishes_what_is_in_flight():
    operations, queue = Operations(3, bad_launches={2}), InFlightQueue(depth=3)
    with pytest.raises(RuntimeError, match="launch 2"):
        launch_all(queue, operations)
    assert operations.finished() == [0, 1]


def test_a_finish_that_fails_in_a_launch_keeps_the_launch_from_being_made():
    operations, queue = Operations(3, bad_finishes={0}), InFlightQueue(depth=2)
    with pytest.raises(RuntimeError, match="finish 0"):
        launch_all(queue, operations)
    assert operations.launched() == [0, 1]


def test_a_failing_finish_does_not_keep_draining_from_the_others():
    operations, queue = Operations(3, bad_finishes={0, 2}), InFlightQueue(depth=3)
    launch_all(queue, operations)
    with pytest.raises(RuntimeError, match="finish 0"):
        queue.drain()
    assert operations.finished() == [0, 1, 2]


def test_a_window_can_be_used_again_after_a_failure():
    queue = InFlightQueue(depth=2)
    with pytest.raises(RuntimeError, match="launch 1"):
        launch_all(queue, Operations(3, bad_launches={1}))
    operations = Operations(2)
    launch_all(queue, operations)
    queue.drain()
    assert operations.finished() == [0, 1]


def test_abandoning_finishes_everything_in_order_and_raises_nothing():
    operations, queue = Operations(4, bad_finishes={0, 2}), InFlightQueue(depth=4)
    launch_all(queue, operations)
    queue.abandon()
    assert operations.finished() == [0, 1, 2, 3]


def test_an_abandoned_window_holds_nothing():
    operations, queue = Operations(2), InFlightQueue(depth=4)
    launch_all(queue, operations)
    queue.abandon()
    queue.drain()
    assert operations.finished() == [0, 1]


def test_an_interrupt_in_a_launch_finishes_what_is_in_flight():
    operations, queue = Operations(2), InFlightQueue(depth=4)
    launch_all(queue, operations)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        queue.launch(interrupted)
    assert operations.finished() == [0, 1]


@given(counts.filter(bool), st.integers(0, 8))
def test_finishing_the_oldest_finishes_one_operation_at_a_time_in_order(count, num_finished):
    operations, queue = Operations(count), InFlightQueue(depth=9)
    launch_all(queue, operations)
    for _ in range(min(num_finished, count)):
        queue.finish_oldest()
    assert operations.finished() == [*range(min(num_finished, count))]


def test_an_oldest_operation_that_fails_finishes_all_others():
    operations, queue = Operations(4, bad_finishes={0, 2}), InFlightQueue(depth=4)
    launch_all(queue, operations)
    with pytest.raises(RuntimeError, match="finish 0"):
        queue.finish_oldest()
    assert operations.finished() == [0, 1, 2, 3]
