"""The configuration: what can be set (schema), how it is read (load, names) and what must hold (validate).

`load_config` merges defaults, a YAML file and `key=value`; `resolve_config` fills what was left unset;
`find_problems` checks the result against the ranks and the model. Nothing mutates a `Config` after that.
"""
