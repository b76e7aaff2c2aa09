"""Quality at equal work and at equal time: chipsparse beside every other way to save steps.

``python -m benchmarks --op equal_work`` generates and records, one record for every clip;
``python -m benchmarks.equal_work FILE...`` joins files of records and prints the tables.
"""
