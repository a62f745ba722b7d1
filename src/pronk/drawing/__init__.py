"""Drawings as SVG, light and dark, and charts made of them."""
