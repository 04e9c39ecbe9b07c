"""How to measure: an idle machine, fresh processes, times, and what the machine can do at best."""
