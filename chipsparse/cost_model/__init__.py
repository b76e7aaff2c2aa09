"""What steps would cost by the rates of a GPU: decides when the plan is made, measures nothing."""
