"""A simulation of a fleet, from which its size is chosen: viewers, gateways, boxes and failures as events of SimPy.

What decides is the server's own code: admission and its queue (`live.admission`), the viewer's clock (`live.pace`), the
choice of a box (`fleet.choice`) and the scheduler of calls (`seko_runtime`). Only what takes time is replaced: calls of
the device, snapshots, the network and the directory take measured durations (`durations`).

`scenario` says how many boxes there are, who arrives and what fails; `session`, `box`, `directory`, `gateway` and
`viewer` are the parts of the fleet; `run` puts them together; `figures` are the results.
"""
