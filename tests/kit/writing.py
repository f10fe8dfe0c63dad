"""Writing one file, without a process and without a save around it."""

from safe_ckpt.core.storage.direct_io import Unwatched
from safe_ckpt.core.writer.content import MemoryContent, TensorContent
from safe_ckpt.core.writer.sink import open_sink
from safe_ckpt.core.writer.sink import write_file as write_content


def write_file(task, memory, options, progress=None, ready=None):
    """From memory, which is filled as far as ``ready`` says."""
    progress = progress or Unwatched()
    sink, content = open_sink(task.path, options), MemoryContent(task, memory, options.chunk_bytes, progress, ready)
    return write_content(sink, task, content, progress)


def stream_file(plan, task, options, progress=None):
    """Straight from the tensors, ``options.chunk_bytes`` at a time."""
    return write_content(open_sink(task.path, options), task, TensorContent(task, plan), progress or Unwatched())
