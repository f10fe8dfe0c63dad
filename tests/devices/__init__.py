"""Programs on the accelerator of ``kit.device``, whose streams run late: trained, saved, resumed, and compared bit for bit with
a twin on the CPU, which has no streams. ``python -m devices --help``, in ``tests``.

``draw`` chooses a program by its seed, ``trainer`` is what is trained, ``program`` runs one, ``planted`` has bugs of order that
must be found, ``runner`` runs many in processes of their own.
"""
