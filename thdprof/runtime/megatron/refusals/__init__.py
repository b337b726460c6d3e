"""Settings of a Megatron run that graphs cannot serve, each with the value to use: pure decisions without torch.

`settings.check` joins the lines of all modules. What analysis knows too stands in `thdprof.megatron_limits`, which
`known_run` asks about this run; the other modules have what only the run itself can know, a module for each concern.
"""
