"""``python -m fmicl.theory`` prints the table of uniformity certificates."""

from fmicl.theory import table

if __name__ == "__main__":
    print(table())
