"""A run of four processes on two hosts loses some, and resumes to the bit.

The hosts are network namespaces; `programs/kill_hosts.py` runs more such losses.
"""

import kill_hosts
import pytest

HEARTBEAT = kill_hosts.HEARTBEAT + kill_hosts.SLACK


@pytest.mark.long
def test_a_run_that_loses_processes_goes_on_to_the_last_bit(tmp_path):
    if (refusal := kill_hosts.refusal()) is not None:
        pytest.skip(refusal)
    with kill_hosts.hosts():
        *_, done = kill_hosts.compare(tmp_path, kills=3, seed=1)
    assert len(done) == 3
    assert all(kill["seconds"] < HEARTBEAT for kill in done)
