"""Asks for 1000 descriptors, and for more than are allowed: prints what it was told, and what the limit is then."""

import resource

from safe_ckpt.core.coordination.network import ensure_descriptors

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))
print(ensure_descriptors(1000) == "", resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1000)
print(ensure_descriptors(10_000))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
