"""A training run: its settings, and the model that it trains."""

from __future__ import annotations

from thdprof.training.model import Fp8Recipe as Fp8Recipe
from thdprof.training.model import Model as Model
from thdprof.training.model import Norm as Norm
from thdprof.training.model import Recompute as Recompute
from thdprof.training.model import check_model as check_model
from thdprof.training.model import model_definitions as model_definitions
from thdprof.training.settings import AXOLOTL_PACKERS as AXOLOTL_PACKERS
from thdprof.training.settings import DEFAULT_PROMPT_FORMAT as DEFAULT_PROMPT_FORMAT
from thdprof.training.settings import DRAWN_PACKERS as DRAWN_PACKERS
from thdprof.training.settings import DYNAMIC_CP as DYNAMIC_CP
from thdprof.training.settings import GRAIN_PACKERS as GRAIN_PACKERS
from thdprof.training.settings import LIMITED_PACKERS as LIMITED_PACKERS
from thdprof.training.settings import MEGATRON_RL_PACKERS as MEGATRON_RL_PACKERS
from thdprof.training.settings import NEMO_PACKERS as NEMO_PACKERS
from thdprof.training.settings import PACKER_ALIASES as PACKER_ALIASES
from thdprof.training.settings import RL_PACKERS as RL_PACKERS
from thdprof.training.settings import STEP_PACKERS as STEP_PACKERS
from thdprof.training.settings import SWIFT_PACKERS as SWIFT_PACKERS
from thdprof.training.settings import TRAINER_PACKERS as TRAINER_PACKERS
from thdprof.training.settings import TRL_MAX_LENGTH as TRL_MAX_LENGTH
from thdprof.training.settings import TRL_PACKERS as TRL_PACKERS
from thdprof.training.settings import Attention as Attention
from thdprof.training.settings import Definition as Definition
from thdprof.training.settings import Experts as Experts
from thdprof.training.settings import GraphKind as GraphKind
from thdprof.training.settings import Kind as Kind
from thdprof.training.settings import Loader as Loader
from thdprof.training.settings import Packer as Packer
from thdprof.training.settings import Panel as Panel
from thdprof.training.settings import PromptFormat as PromptFormat
from thdprof.training.settings import Setting as Setting
from thdprof.training.settings import TailPolicy as TailPolicy
from thdprof.training.settings import TrainingOptions as TrainingOptions
from thdprof.training.settings import TrainingSettings as TrainingSettings
from thdprof.training.settings import definitions as definitions
from thdprof.training.settings import definitions_of as definitions_of
from thdprof.training.settings import find_defaults as find_defaults
from thdprof.training.settings import find_unread_fields as find_unread_fields
from thdprof.training.settings import name_setting as name_setting
from thdprof.training.settings import shared_capture_ranks as shared_capture_ranks
from thdprof.training.settings import suggest_setting as suggest_setting
