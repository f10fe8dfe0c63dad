"""Values of ``storage.options`` and of the environment: they leave the process by no pickle and no error."""

import copy
import dataclasses
import pickle

from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place

SECRET = "hunter2hunter2"
OPTIONS = StorageOptions(options=(f"secret_access_key={SECRET}", "access_key_id=someone"), part_bytes=5 << 20)


def test_a_pickle_holds_the_address_alone():
    """What a save returns can be pickled, shows no secret then, and names the same place where it is loaded."""
    place = open_place("s3://bucket/run", OPTIONS)
    info = CheckpointInfo(
        path=place, name="run", step=1, sequence=1, metrics={}, created_at="", world_size=1, size_bytes=0
    )
    data = pickle.dumps((info, place.bucket, OPTIONS))
    assert SECRET.encode() not in data
    again, bucket, options = pickle.loads(data)
    assert again == info
    assert again.path.bucket.options.options == options.options == ()
    assert (bucket.url, options.part_bytes) == ("s3://bucket", 5 << 20)


def test_a_copy_within_the_process_keeps_the_options():
    """Only a pickle loses them: a copy reaches the store as before."""
    place = open_place("s3://bucket/run", OPTIONS)
    for one in (copy.copy(place), copy.deepcopy(place), copy.deepcopy([place])[0]):
        assert one.bucket.options.given["secret_access_key"] == SECRET
    assert place.bucket.within(3).options == dataclasses.replace(OPTIONS, give_up_after_s=3)
    assert copy.deepcopy(OPTIONS) == OPTIONS
