"""Files of hospitals (``promptfed[medical]``): DICOM. Its libraries are imported by use alone.

Child processes read the files (`..worker`), with bounds on memory and time; `..readers` runs them. Of headers only
keyed ids stay (`keys`), in an index that later starts read (`index`).
"""
