"""PDF files, written by hand."""


def pdf_of(*pages: str) -> bytes:
    """Write a PDF without a table of its objects: a page for each text, with all its lines."""
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {len(pages)} /Kids [{kids}] >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        lines = " ".join(f"({line}) Tj 0 -20 Td" for line in text.splitlines())
        drawn = f"BT /F1 12 Tf 72 700 Td {lines} ET"
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * number} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>",
            f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        ]
    body = "".join(f"{n} 0 obj\n{each}\nendobj\n" for n, each in enumerate(objects, start=1))
    return f"%PDF-1.4\n{body}trailer << /Root 1 0 R >>\nstartxref\n0\n%%EOF".encode("ascii")
