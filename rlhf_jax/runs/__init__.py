"""Run folders: configs, metrics, snapshots, alarms and command lines."""
