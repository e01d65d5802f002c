"""What the paper reports for its two large workloads, by figure name. Hours are hours; ratios are of end-to-end times."""

RATIOS_122B = {
    "E1/E0": 1.109,
    "E2/E0": 1.022,
    "C2/E0": 1.19,
    "C2/C1": 0.852,
    "C1/C0": 0.971,
    "C3/C2": 1.076,
    "A1/A0": 1.077,
    "A2/A0": 1.299,
    "A3/A0": 0.884,
    "A3/E1": 1.24,
    "C2/E1": 1.08,
}
"""Ratios of 12-step times in the ablation."""

HOURS_122B = {"E0": 16.12, "E2": 16.47}

STATISTICS_122B = {
    "mean execution (h)": 1.93,
    "mean query (h)": 2.96,
    "queries >= 4 h": 0.0951,
    "harness timeout": 0.0625,
    "overall timeout": 0.0087,
    "slack in E0": 0.2085,
}
"""Of E0."""

SPEEDUPS_48 = {"Async": (1.42, 1.53), "Colocate": (1.36, 1.47)}
"""Ranges over E[d] = 1 and 1.5, 48 steps."""

ORDERINGS_122B = (("E0", "C2", "C1", "C0"), ("E0", "E1", "A3", "A0", "A2"))
"""From fastest to slowest."""

HOURS_24T = {"elastic (h)": 75.42, "async (h)": 134.55, "colocate (h)": 91.47}
RATIOS_24T = {"async/elastic": 1.78, "colocate/elastic": 1.21}
STATISTICS_24T = {"queries >= 4 h": 0.611, "of these, overall timeout": 0.382}
