# SPDX-License-Identifier: Apache-2.0
"""What every other folder may use: errors, files, the modules of a folder."""
