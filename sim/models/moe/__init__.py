"""Mixture of experts in training. Tokens pass `router`, `exchange` (there), `matmuls`, `exchange` (home).

Lepikhin et al. 2020 (GShard); Fedus et al. 2021 (capacity); DeepSeek-V3 2024 (shared experts, node-limited routing).
"""
