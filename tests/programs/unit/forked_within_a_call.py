"""A process is forked while a thread is within a call of a Background: prints how the child ended, and if the thread lives."""

import os
import threading

from safe_ckpt.core.staging.worker_thread import Background, Refused

background = Background("b", lambda item: None)
background.put(1)
held, let_go = threading.Event(), threading.Event()


def hold():
    with background._changing:
        held.set()
        let_go.wait()


threading.Thread(target=hold, daemon=True).start()
held.wait()
pid = os.fork()
if not pid:
    background.end()
    background.join(5)
    try:
        background.put(2)
    except Refused:
        os._exit(7)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
let_go.set()
background.put(3)
background.end()
background.join(5)
print(background.is_alive)
