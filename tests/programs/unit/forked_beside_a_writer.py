"""A forked process ends its copy of a writer process: prints the status of the writer then, and after its own parent has."""

import os

from safe_ckpt.core.writer.workers import WriterClient

child = WriterClient(0)
pid = os.fork()
if not pid:
    child.kill()
    os._exit(0)
os.waitpid(pid, 0)
print(child._process.poll())
child.kill()
print(child._process.poll())
