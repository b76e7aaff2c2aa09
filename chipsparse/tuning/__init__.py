"""Budgets and schedules from measurements: what each layer and step costs in time and in quality.

`calibration` measures the error of every layer at every budget in dense generations, `layer_times`
its time. `error_model` and `time_model` turn both into a prediction for any config, `allocation`
finds the configs that nothing beats in that prediction, and `search` walks along them with real
paired generations. `results_file` keeps whatever was measured.
"""
