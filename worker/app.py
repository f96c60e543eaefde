"""What is the Celery app of CPU workers and of the beat?

    celery -A worker.app worker -P prefork -Q cpu
    celery -A worker.app beat                        exactly one

It imports no torch: that is the engine workers' (`worker.engine_app`).
"""

from service.settings import Settings
from worker.broker import make_app

app = make_app(Settings(), include=("worker.tasks",))
