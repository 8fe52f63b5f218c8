"""Work shared among forked copies: every job once, and a copy that dies costs its own job only."""

import faulthandler
import os
import time

import pytest

from fusescout.forks import count_done


@pytest.mark.parametrize("processes", [1, 3, 50])
def test_every_job_is_done_once(processes, tmp_path):
    def work(number):
        with (tmp_path / str(number)).open("x"):
            return number % 3 == 0

    assert count_done(work, range(20), processes) == 7
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == list(range(20))


def test_no_jobs_and_no_copies():
    assert count_done(bool, (), 4) == 0


def die(_):
    faulthandler.disable()  # its report would stand among the results of tests
    os.abort()


def test_a_copy_that_dies_or_raises_costs_one_job():
    def work(number):
        if number == 0:
            die(number)
        if number == 1:
            raise ValueError("this copy ends here")
        time.sleep(0.01)  # so that the others have time to take a job each
        return True

    assert count_done(work, range(12), 4) == 10


def test_when_all_copies_die_the_caller_goes_on():
    assert count_done(die, range(100_000), 2) == 0
