"""Parts of the core that adapters use as they are, in one place: they may not import the core themselves."""

from __future__ import annotations

from safe_ckpt.adapters import export, one_shot
from safe_ckpt.adapters.export import Exporter
from safe_ckpt.core.coordination.agreed_config import agree_on_settings, config_of_all, refused_retention
from safe_ckpt.core.coordination.coordinator import open_coordinator
from safe_ckpt.core.coordination.rounds import reraise
from safe_ckpt.core.formats import file_plan, hugging_face, safetensors
from safe_ckpt.core.formats.file_plan import LazyTensor
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, read_manifest
from safe_ckpt.core.formats.names import wrapped
from safe_ckpt.core.formats.refusals import is_short, refuse_short
from safe_ckpt.core.formats.verify import is_marked, verify_if_ours
from safe_ckpt.core.home.candidates import WEIGHTS, by_commit, list_files, look_at
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.home.home import HIDDEN, HIDDEN_TOO, NAMES, Additions, Candidate, NewCheckpoint, Pointer
from safe_ckpt.core.home.retention import delete_listed, keep_newest, policy_of
from safe_ckpt.core.home.standing import Catalog, is_of, named_by, standing_of
from safe_ckpt.core.resuming import one_resume
from safe_ckpt.core.resuming.named import names_in, not_found, refuse_missing
from safe_ckpt.core.saving.handle import SaveHandle
from safe_ckpt.core.saving.names import refuse
from safe_ckpt.core.saving.request import Destination, Facts, SaveRequest, check_step, checked_metrics
from safe_ckpt.core.sharding import dtensor
from safe_ckpt.core.sharding.dtensor import is_divided, keeping_types
from safe_ckpt.core.sharding.gather import gather_nested
from safe_ckpt.core.state.overlap import OverlapPlan
from safe_ckpt.core.state.rng import get_rng_state, set_rng_state
from safe_ckpt.core.storage import durable, presence
from safe_ckpt.core.storage.durable import Link
from safe_ckpt.core.storage.objects.place import absolute
from safe_ckpt.core.storage.presence import checked_name, really_inside
from safe_ckpt.offload.consolidate import agree_parts, own_part
from safe_ckpt.offload.restore import Part, files_of_parts, restore_files
