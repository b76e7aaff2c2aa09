"""The cost of steps by the rates of a GPU, known when the plan is made; nothing is measured."""
