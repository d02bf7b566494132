"""torchtitan's TOML and Python configs."""
