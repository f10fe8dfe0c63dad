import os
import signal

# torch looks up 127.0.0.1 backwards on every connection; where the resolver drops a packet that is five seconds each.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell's background jobs, and what they start, ignore Ctrl-C: here programs are sent it, and must hear it.
signal.signal(signal.SIGINT, signal.default_int_handler)
