"""Every setting of a run, and how they are read from YAML files and command lines. Imports no torch."""

from bigscl.config.load import (
    ConfigError,
    changed_settings,
    checked,
    doubtful_settings,
    load_config,
    load_data_settings,
    make_config,
    make_objective,
    parse_yaml,
    to_yaml,
    with_digest,
)
from bigscl.config.schema import CheckpointConfig, Config, DataConfig, RankBy, StoreConfig, ValidationConfig
from bigscl.data.labels.training_labels import GivenConfig
