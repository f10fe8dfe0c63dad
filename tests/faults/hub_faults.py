"""Faults at requests to what behaves as the S3 endpoint of Hugging Face Buckets.

    PYTHONPATH=tests:tests/faults python -m hub_faults FAULTS SEED

Two jobs save after each other through a proxy, in front of the gateway; what a 302 leads to is asked through it, too. Each
such life has several faults. What was reported as committed must be there, whole, after each deletion and at the end; a start
without faults goes on from it. A broken promise raises.
"""

import collections
import random
import sys
import tempfile
import time
from pathlib import Path

from object_job import check, outcome
from object_sweep import FAULTS, Point, count_of, two_jobs

from kit.fault_proxy import FaultProxy
from kit.hub_gateway import HubGateway
from kit.object_servers import start

HUB_FAULTS = [*FAULTS, ("flipped", "after")]
EACH = 12


def lives(hub, count, seed, each=EACH):
    """Go through at least so many faults, ``each`` in a life. Yields the faults that came in each, and what followed."""
    chance = random.Random(seed)
    with FaultProxy(hub.endpoint) as proxy:
        proxy.hold_s, proxy.later_s = 1.3, 0.1
        total, done = count_of(hub, proxy), 0
        while done < count:
            inline = chance.random() < 0.9
            numbers = sorted(chance.sample(range(1, total + 1), min(each, count - done)))
            points = [Point(number, *chance.choice(HUB_FAULTS), inline=inline) for number in numbers]
            try:
                store, said, watch = two_jobs(hub, proxy, points)
                came = [record.fault for record in proxy.hits]
                try:
                    check(store, said, problems=watch.problems)
                finally:
                    store.wipe()
            except Exception as error:
                error.add_note(f"at {points}")
                raise
            done += len(came)
            yield came, outcome(said)


def main(count, seed):
    """Say what came of them."""
    outcomes, kinds, begun = collections.Counter(), collections.Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, start("ministack", Path(folder)) as server, HubGateway(server) as hub:
        for came, word in lives(hub, count, seed):
            outcomes[word] += 1
            kinds.update(came)
            print(f"{kinds.total()} faults, {time.monotonic() - begun:.0f} s: {dict(outcomes)}", flush=True)
        print(f"seed {seed}: {dict(kinds)}; {hub.redirects} answers of 302; no promise was broken")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
