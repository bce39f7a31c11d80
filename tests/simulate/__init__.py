"""Tests of clustertune/simulate."""
