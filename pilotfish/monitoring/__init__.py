"""Monitoring: Grafana dashboards and Prometheus alert rules for edge, device and watch."""
