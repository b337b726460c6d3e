"""A training run: its settings, and the model that it trains."""

from __future__ import annotations

from thdprof.training.model import Fp8Recipe as Fp8Recipe
from thdprof.training.model import Model as Model
from thdprof.training.model import Norm as Norm
from thdprof.training.model import Recompute as Recompute
from thdprof.training.model import check_model as check_model
from thdprof.training.model import model_definitions as model_definitions
from thdprof.training.settings import DEFAULT_PROMPT_FORMAT as DEFAULT_PROMPT_FORMAT
from thdprof.training.settings import Attention as Attention
from thdprof.training.settings import Definition as Definition
from thdprof.training.settings import Experts as Experts
from thdprof.training.settings import GraphKind as GraphKind
from thdprof.training.settings import Impl as Impl
from thdprof.training.settings import Loader as Loader
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
from thdprof.training.systems import FORMATS as FORMATS
from thdprof.training.systems import PACKER_ALIASES as PACKER_ALIASES
from thdprof.training.systems import PACKERS as PACKERS
from thdprof.training.systems import Kind as Kind
from thdprof.training.systems import PackerName as PackerName
from thdprof.training.systems import has_dynamic_cp as has_dynamic_cp
