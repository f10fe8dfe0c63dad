import os

# torch looks up 127.0.0.1 backwards on every connection; where the resolver drops a packet that is five seconds each.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
