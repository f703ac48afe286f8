"""Copy executors: reference, CPU and Triton, all driven by the same copy specification."""
