"""A simulation of a fleet, with viewers, gateways, boxes and failures as events of SimPy. Users choose a fleet's size
by the simulation's results.

All decisions are made by the server's own code: admission and its queue (`live.admission`), the viewer's clock
(`live.pace`), the choice of a box (`fleet.choice`) and the scheduler of calls (`seko_runtime`). Whatever takes time is
simulated: calls of the device, snapshots, the network and the directory last for measured durations (`durations`).

`scenario` has the settings; `session`, `box`, `directory`, `gateway` and `viewer` are the parts of the fleet; `run`
puts them together; `figures` has the results.
"""
